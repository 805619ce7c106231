"""Replays: what comes out again is compared, what is lost is healed, and nothing else changes."""

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.controller import Wait
from arroyo_dagster.errors import AttemptError, ProtocolError
from arroyo_dagster.log import names
from arroyo_dagster.log.entries import ReplayOutcome, Rewound
from arroyo_dagster.model import EpochSet
from arroyo_dagster.replay import Replayed, begin_replay, finish_replay, go_on_replay, replay
from arroyo_dagster.sinks import DeltaSink, ParquetSink
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.operators import RunningTotal
from tests.engine.oracle import take_epochs

EPOCHS = 4
ROWS = pa.table(
    {
        "k": [f"key {number % 7}" for number in range(200)],
        "v": list(range(200)),
        "t": pa.array([number * 1_000_000 for number in range(200)], pa.timestamp("us")),
    }
)


def engine_in(
    directory: Path, rows: pa.Table = ROWS, parallelism: int = 2, run_id: str | None = None
) -> InProcessEngine:
    """Windows to Delta, running totals to Parquet."""
    pipeline = Pipeline("replays", state_url=str(directory / "state"), parallelism=parallelism)
    stream = pipeline.source("rows", TableSource(rows, [50, 100, 150, 200], 3), event_time="t")
    windows = stream.key_by("k").tumble("10 seconds").aggregate("windows", n=agg.count(), top=agg.max("v"))
    windows.sink("closed", DeltaSink(str(directory / "closed")))
    stream.key_by("k").process("totals", RunningTotal()).sink("running", ParquetSink(str(directory / "running")))
    return InProcessEngine(pipeline, run_id=run_id)


@pytest.fixture
def engine(tmp_path: Path) -> InProcessEngine:
    engine = engine_in(tmp_path)
    take_epochs(engine, EPOCHS)
    return engine


def replayed(engine: InProcessEngine, epoch: int) -> Replayed:
    outcome = replay(engine, epoch)
    assert isinstance(outcome, Replayed)
    return outcome


def objects(directory: Path) -> set[str]:
    """Every file but the log's and its snapshots."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path) for path in files if not {"log", "snapshots"} & set(path.parts)}


def output(directory: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    closed = DeltaTable(str(directory / "closed")).to_pyarrow_table()
    running = ds.dataset([str(path) for path in (directory / "running").glob("*.parquet")]).to_table()
    return tuple(sorted(table.to_pylist(), key=repr) for table in (closed, running))  # type: ignore[return-value]


def test_every_epoch_comes_out_the_same_and_leaves_nothing_behind(engine: InProcessEngine, tmp_path: Path) -> None:
    before = objects(tmp_path)
    for epoch in range(1, EPOCHS + 1):
        assert replayed(engine, epoch).outcome is ReplayOutcome.IDENTICAL
    assert objects(tmp_path) == before
    state = engine.state()
    assert (state.verified, state.head, state.replays) == (EpochSet.of([1, 2, 3, 4]), EPOCHS, ())
    assert engine.verify() == []


def test_the_parallelism_of_the_epoch_is_used_again(engine: InProcessEngine, tmp_path: Path) -> None:
    assert replayed(engine_in(tmp_path, parallelism=5), 3).differences == ()


def test_what_differs_is_named_and_nothing_is_published(engine: InProcessEngine, tmp_path: Path) -> None:
    before, was = objects(tmp_path), output(tmp_path)
    values = [1000 if number == 60 else number for number in range(200)]
    changed = engine_in(tmp_path, ROWS.set_column(1, "v", pa.array(values)))
    different = replayed(changed, 2)
    assert all(one.endswith("now, and not the same") for one in different.differences)
    assert [one.split(":")[0] for one in different.differences] == [
        "table totals.totals",
        "output closed",
        "output running",
    ]
    assert (objects(tmp_path), output(tmp_path)) == (before, was)
    assert engine.state().differing == EpochSet.of([2])


@pytest.mark.parametrize("sink", ["closed", "running"])
def test_lost_output_is_published_again(engine: InProcessEngine, tmp_path: Path, sink: str) -> None:
    was = output(tmp_path)
    path = next(path for path in (tmp_path / sink).rglob("*.parquet") if "epoch-0000000002" in str(path))
    path.unlink()
    assert len(engine.verify()) == 1
    for _ in range(2):
        healed = replayed(engine, 2)
        assert (healed.outcome, healed.healed) == (ReplayOutcome.IDENTICAL, (sink,))
        assert engine.verify() == []
        assert output(tmp_path) == was
        assert replayed(engine, 2).healed == ()
        shown = {*map(Path, DeltaTable(str(tmp_path / "closed")).file_uris()), *(tmp_path / "running").iterdir()}
        next(path for path in sorted(shown) if f"{sink}/" in str(path) and "epoch-0000000002" in str(path)).unlink()
        assert len(engine.verify()) == 1  # what was healed may be lost again


def test_a_delta_table_that_others_have_rewritten_is_not_healed(engine: InProcessEngine, tmp_path: Path) -> None:
    DeltaTable(str(tmp_path / "closed")).delete("k = 'key 1'")  # some files are rewritten by that, others are not
    table = DeltaTable(str(tmp_path / "closed"))
    [left] = [Path(uri) for uri in table.file_uris() if "epoch-0000000003" in uri]
    left.unlink()
    with pytest.raises(ProtocolError, match=r"cannot publish epoch 3 again: its rows .* were rewritten by others"):
        replay(engine, 3)
    assert DeltaTable(str(tmp_path / "closed")).version() == table.version()


def test_a_rewound_epoch_can_still_be_replayed_from_where_it_stands(engine: InProcessEngine) -> None:
    state = engine.state()
    engine.record(Rewound(2, state.line.after(2)))
    engine.publish()
    assert replayed(engine, 2).outcome is ReplayOutcome.IDENTICAL
    refused = replay(engine, 3)
    assert isinstance(refused, Wait)
    assert "epoch 3 cannot be replayed; live epochs are 1-2" in refused.reason


def test_a_replay_that_fails_says_so_and_changes_nothing(engine: InProcessEngine, tmp_path: Path) -> None:
    was = output(tmp_path)
    engine.disturb = lambda messages: messages.slice(1)
    with pytest.raises(AttemptError, match="from rows"):
        replay(engine, 2)
    state = engine.state()
    assert (state.replays, state.verified, state.differing, state.head) == ((), EpochSet(), EpochSet(), EPOCHS)
    assert output(tmp_path) == was
    assert engine.verify() == []


def test_replays_run_beside_each_other_and_beside_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    take_epochs(engine, 2)
    attempts = [begin_replay(engine, epoch) for epoch in (1, 2, 2)]
    take_epochs(engine, 1)
    outcomes = []
    for attempt in attempts:
        assert not isinstance(attempt, Wait)
        reports: dict[str, StageReport] = {}
        for stage in engine.stages:
            reports[stage.name] = engine.run_stage(attempt, stage.name, reports)
        done = finish_replay(engine, attempt, list(reports.values()))
        assert isinstance(done, Replayed)
        outcomes.append(done.outcome)
    assert outcomes == [ReplayOutcome.IDENTICAL] * 3
    assert engine.state().head == 3


def test_a_replay_that_was_given_up_is_gone_on_with_as_a_new_one(engine: InProcessEngine) -> None:
    attempt = begin_replay(engine, 2, "run 1")
    assert not isinstance(attempt, Wait)
    assert go_on_replay(engine, attempt, "run 1") == attempt
    engine.give_up(attempt, "it took longer than the time-out")
    again = go_on_replay(engine, attempt, "run 1")
    assert not isinstance(again, Wait)
    assert (again.number, again.prefix) == (2, names.replay(2, 2))
    assert go_on_replay(engine, attempt, "run 1") == again
    assert [replay.started.attempt for replay in engine.state().replays] == [2]
