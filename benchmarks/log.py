"""What a long history costs: reading a pipeline's state and appending to its log, on a local disk.

    uv run python -m benchmarks.log --json

Nothing is ever cleaned here, so that all epochs are kept: the worst case.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pendulum

from arroyo_dagster.log import Appended, Log, PipelineState, names, open_store
from arroyo_dagster.log.documents import pack_entry
from arroyo_dagster.log.entries import (
    CheckpointCompleted,
    CheckpointStarted,
    Entry,
    EpochPinned,
    Fact,
    PipelineCreated,
    SinksCommitted,
)
from arroyo_dagster.log.state import apply
from arroyo_dagster.model import CheckpointBarrier, Plan, SourceRange

START = pendulum.datetime(2026, 1, 1)


def build(directory: Path, epochs: int) -> None:
    """Write a history of so many epochs. Its last part goes through the log itself, which makes the snapshots."""
    state = write(directory, PipelineState(), PipelineCreated("life", 128, "benchmark"))
    by_hand = max(epochs - 20, 0)
    for _ in range(by_hand):
        for step in range(3):
            state = write(directory, state, fact(state, step))
    log = Log(open_store(str(directory)), "benchmark")
    for _ in range(epochs - by_hand):
        for step in range(3):
            state = append(log, fact(state, step))


def fact(state: PipelineState, step: int) -> Fact:
    epoch = state.next_epoch
    match step:
        case 0:
            plan = Plan({"bids": SourceRange(state.head * 1000, epoch * 1000)})
            return CheckpointStarted(CheckpointBarrier(epoch, 0, START, then_stop=False), 1, state.head, plan, "run")
        case 1:
            return CheckpointCompleted(epoch, 1, names.manifest(epoch, 1))
        case _:
            return SinksCommitted(state.head, state.sequence)


def write(directory: Path, state: PipelineState, new: Fact) -> PipelineState:
    entry = Entry(state.sequence + 1, f"benchmark/{state.sequence}", START.add(seconds=state.sequence), new)
    path = directory / names.log_entry(entry.sequence)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pack_entry(entry))
    return apply(state, entry)


def append(log: Log, new: Fact) -> PipelineState:
    outcome = log.append(log.read(), new)
    if not isinstance(outcome, Appended):
        sys.exit(f"the benchmark's log is in other hands: {outcome}")
    return outcome.state


def measure(directory: Path, times: dict[str, list[float]]) -> None:
    """Append one entry, then read the state as a new process would, and as the same process would again."""
    log = Log(open_store(str(directory)), "benchmark")
    state = log.read()
    clock = [time.perf_counter()]
    log.append(state, EpochPinned(state.head, "benchmark"))
    clock.append(time.perf_counter())
    log = Log(open_store(str(directory)), "benchmark")
    log.read()
    clock.append(time.perf_counter())
    log.read()
    clock.append(time.perf_counter())
    for name, begun, ended in zip(("append_ms", "read_ms", "read_again_ms"), clock, clock[1:], strict=False):
        times[name].append((ended - begun) * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="+", default=[100, 10_000], help="lengths of history to compare")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    times: dict[int, dict[str, list[float]]] = {epochs: defaultdict(list) for epochs in arguments.epochs}
    with tempfile.TemporaryDirectory() as root:
        for epochs in arguments.epochs:
            Path(root, str(epochs)).mkdir()
            build(Path(root, str(epochs)), epochs)
        for _ in range(arguments.repeats):  # in turns, so that a busy moment of the machine touches all alike
            for epochs in arguments.epochs:
                measure(Path(root, str(epochs)), times[epochs])
    results = [
        {"epochs": epochs, **{name: statistics.median(values) for name, values in times[epochs].items()}}
        for epochs in arguments.epochs
    ]
    ratio = results[-1]["read_ms"] / results[0]["read_ms"]
    if arguments.json:
        print(json.dumps({"results": results, "read_ratio": ratio}))
        return
    for row in results:
        print(
            "{epochs:>7} epochs: read {read_ms:.2f} ms, again {read_again_ms:.2f} ms, append {append_ms:.2f} ms".format(
                **row
            )
        )
    print(f"reading the longest against the shortest: {ratio:.2f} times")


if __name__ == "__main__":
    main()
