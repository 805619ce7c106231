"""Lives of a pipeline in processes that are killed. Run as a script, it forks one process for each life.

    python -m tests.engine.crashes DIRECTORY steps|storage|moments FIRST STRIDE [MOST]
    python -m tests.engine.crashes DIRECTORY sc://... STEP

This process itself touches neither storage nor Arrow's threads, so that its children can. With the address of a Spark
Connect server it forks none, but lives there itself, and dies at that step of its life (0: not at all).
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pendulum
import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.engine import Engine, Taken
from arroyo_dagster.log.store import ObjectStorage
from arroyo_dagster.processes import live_runs, own_run_id
from arroyo_dagster.sinks import DeltaSink, ParquetSink
from arroyo_dagster.sources import FileSource
from arroyo_dagster.spark import open_session
from arroyo_dagster.testing import InProcessEngine
from tests.engine.operators import RunningTotal

EPOCHS = 3
SECOND = 1_000_000


def write_input(directory: Path) -> None:
    """Three files, for three epochs."""
    chance = random.Random(3)
    directory.mkdir(parents=True)
    for number in range(EPOCHS):
        times = [(number * 30 + chance.randrange(30)) * SECOND for _ in range(80)]
        table = pa.table(
            {
                "k": [f"key {chance.randrange(6)}" for _ in times],
                "v": [chance.randrange(100) for _ in times],
                "t": pa.array(times, pa.timestamp("us", "UTC")),
            }
        )
        path = directory / f"{number}.parquet"
        pq.write_table(table, path)
        os.utime(path, (number, number))


def pipeline_in(directory: Path, rows: Path) -> Pipeline:
    """Windows to Delta, running totals to Parquet."""
    pipeline = Pipeline("crashes", state_url=str(directory / "state"), parallelism=2)
    source = FileSource(str(rows), max_files_per_epoch=1)
    stream = pipeline.source("rows", source, event_time="t", watermark_delay="5 seconds")
    windows = stream.key_by("k").tumble("10 seconds").aggregate("windows", n=agg.count(), top=agg.max("v"))
    windows.sink("closed", DeltaSink(str(directory / "closed")))
    stream.key_by("k").process("totals", RunningTotal()).sink("running", ParquetSink(str(directory / "running")))
    return pipeline


def live(engine: Engine) -> None:
    """Take epochs, from wherever the log stands, until there are enough of them and their output is out."""
    policy = replace(engine.pipeline.policy, interval=pendulum.duration(microseconds=1), backoff=pendulum.duration())
    while (state := engine.state()).head < EPOCHS or state.sinks:
        outcome = engine.run_epoch(live_runs(state), policy)
        if not isinstance(outcome, Taken):
            raise SystemExit(outcome.reason)


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Run something in a process of its own, and tell how that ended; kill it after so many seconds."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Death:
    """Ends the process at the nth of the things that it counts."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_storage(death: Death) -> None:
    """Let death come before and after every call that changes something on storage."""
    for name in [name for name in ("create", "delete", "move") if hasattr(ObjectStorage, name)]:
        method = getattr(ObjectStorage, name)

        def deadly(self: ObjectStorage, *args: Any, method: Any = method) -> Any:
            death()
            result = method(self, *args)
            death()
            return result

        setattr(ObjectStorage, name, deadly)


def one_life(directory: Path, rows: Path, kind: str, number: int) -> bool:
    """Live until death number so and so, then live on to the end. False when death never came."""

    def first() -> None:
        death = Death(number)
        if kind == "storage":
            die_in_storage(death)
        on_step = death if kind == "steps" else lambda step: None
        live(InProcessEngine(pipeline_in(directory, rows), run_id=own_run_id(), on_step=on_step))

    def last() -> None:
        engine = InProcessEngine(pipeline_in(directory, rows), run_id=own_run_id())
        live(engine)
        (directory / "problems.json").write_text(json.dumps(engine.verify()))

    if kind == "moments":
        chance = random.Random(number)
        for _ in range(6):
            in_child(first, chance.random() * 0.6)
        died = True
    else:
        died = in_child(first) == -signal.SIGKILL
    if in_child(last) != 0:
        raise SystemExit(f"after {kind} {number}, nobody could go on")
    return died


def live_on_spark(directory: Path, remote: str, step: int) -> None:
    """Live on a Spark Connect server."""
    pipeline = pipeline_in(directory, directory / "rows")
    session = partial(open_session, remote=remote)
    engine = Engine(pipeline, session=session, run_id=own_run_id(), on_step=Death(step))
    live(engine)
    (directory / "problems.json").write_text(json.dumps(engine.verify()))


def main() -> None:
    """Live until a death is asked for that does not come any more, or until 1,000 were died."""
    if sys.argv[2].startswith("sc://"):
        live_on_spark(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
        return
    directory, kind, first, stride = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    most = int(sys.argv[5]) if len(sys.argv) > 5 else 1000
    rows = directory / "rows"
    write_input(rows)
    for life in range(most):
        number = first + life * stride
        if not one_life(directory / f"{kind}-{number}", rows, kind, number):
            break


if __name__ == "__main__":
    main()
