"""A whole life of a pipeline, with one fault at every storage call in turn, before and after its effect.

Whatever happens, the life is carried on by a process that knows nothing but the log, and ends the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from arroyo_dagster import Retention
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import Appended, Log, PipelineState, Store, names, open_store
from arroyo_dagster.log.entries import CleanupCompleted, CleanupStarted, Fact
from arroyo_dagster.model import CheckpointBarrier, EpochSet, Manifest, ObjectPath, Plan, TableFiles
from arroyo_dagster.retention import plan_cleanup
from arroyo_dagster.testing import Crash, Fault, FaultyStore, at_call
from tests.facts import CREATED, NOON, aborted, committed, completed, file, rewound, started


@dataclass(frozen=True)
class Step:
    """One entry of the log: whether the state shows it to be there, and the fact that it states."""

    done: Callable[[PipelineState], bool]
    fact: Callable[[PipelineState], Fact]


def epoch(number: int) -> list[Step]:
    return [
        Step(lambda state: state.in_flight is not None or state.last_epoch >= number, started),
        Step(lambda state: state.last_epoch >= number, completed),
        Step(lambda state: state.sinks is None, committed),
    ]


def data_file(state: PipelineState, number: int) -> ObjectPath:
    return ObjectPath(f"{names.attempt(number, state.attempt_of(number))}/state/new.parquet")


def cleanup(state: PipelineState) -> CleanupStarted:
    """Plan with manifests in which every epoch names a file of its own."""
    manifests = [
        Manifest(
            CheckpointBarrier(number, 0, NOON, then_stop=False),
            state.attempt_of(number),
            number - 1,
            Plan(),
            (TableFiles("stats", "partials", (file(data_file(state, number)),)),),
        )
        for number in state.kept
    ]
    plan = plan_cleanup(state, manifests, Retention(keep_last=1), NOON)
    return plan.started()


LIFE = [
    Step(lambda state: state.created, lambda _: CREATED),
    *epoch(1),
    *epoch(2),
    *epoch(3),
    # The fourth epoch dies at its first attempt.
    Step(lambda state: state.attempts > 0 or state.last_epoch > 3, started),
    Step(lambda state: not (state.in_flight and state.in_flight.started.attempt == 1) or state.last_epoch > 3, aborted),
    *epoch(4),
    *epoch(5),
    # Cleaning leaves the head, and its parent for a replay.
    Step(lambda state: state.min_epoch > 0, cleanup),
    Step(lambda state: state.cleanup is None, lambda state: CleanupCompleted(state.cleanup.cleanup, 3, 30)),  # type: ignore[union-attr]
    Step(lambda state: 5 not in state.live, lambda state: rewound(state, 4)),
    Step(lambda state: state.sinks is None, committed),
    *epoch(6),
]


@dataclass
class Process:
    """Lives the life, from wherever the log says it stands, until it ends or something fails."""

    store: Store
    stated: list[Fact] = field(default_factory=list)

    def run(self) -> None:
        log = Log(self.store, "ann", clock=lambda: NOON, sleep=lambda _: None, snapshot_every=4)
        for step in LIFE:
            state = log.read()
            if step.done(state):
                continue
            fact = step.fact(state)
            self.do(state, fact)
            assert isinstance(log.append(state, fact), Appended)
            self.stated.append(fact)

    def do(self, state: PipelineState, fact: Fact) -> None:
        """Write or delete the files that the fact speaks of, before it is stated."""
        if fact == completed_or_none(state):
            assert state.in_flight
            start = state.in_flight.started
            path = ObjectPath(f"{names.attempt(start.barrier.epoch, start.attempt)}/state/new.parquet")
            self.store.create(path, b"rows")
        if isinstance(fact, CleanupCompleted):
            needed = {data_file(state, number) for number in state.kept}
            for path in self.store.names(ObjectPath("epochs")):
                if path not in needed:
                    self.store.delete(path)


def completed_or_none(state: PipelineState) -> Fact | None:
    return completed(state) if state.in_flight else None


def facts(store: Store) -> list[Fact]:
    return [entry.fact for entry in Log(store, "auditor").entries()]


def calm_life() -> tuple[list[Fact], int]:
    """All the facts of a life without a fault, and how many storage calls it takes."""
    store = FaultyStore(open_store("memory://"))
    Process(store).run()
    calls = len(store.calls)
    return facts(store), calls


EXPECTED, CALLS = calm_life()


def test_the_life_takes_every_turn_that_it_should() -> None:
    storage = open_store("memory://")
    Process(storage).run()
    state = Log(storage, "auditor").read()
    assert (state.head, state.live, state.superseded) == (6, EpochSet.of([4, 6]), EpochSet.of([5]))
    assert state.attempt_of(4) == 2
    assert len(EXPECTED) == len(LIFE) == 25
    assert CALLS > 60


@pytest.mark.parametrize("fault", Fault)
def test_one_fault_anywhere_changes_nothing_in_the_end(fault: Fault) -> None:
    survived = 0
    for number in range(1, CALLS + 1):
        storage = open_store("memory://")
        process = Process(FaultyStore(storage, at_call(number, fault)))
        try:
            process.run()
            survived += 1
        except (StorageError, Crash):
            so_far = len(process.stated)
            assert facts(storage) in (EXPECTED[:so_far], EXPECTED[: so_far + 1]), f"call {number}"
            Process(storage).run()
        assert facts(storage) == EXPECTED, f"call {number}"
        state = Log(storage, "auditor").read()
        assert storage.names(ObjectPath("epochs")) == [data_file(state, one) for one in state.kept], f"call {number}"
    # An append settles a passing fault by itself. Nothing survives a crash.
    if fault in {Fault.BEFORE, Fault.AFTER}:
        assert survived >= len(LIFE)
    else:
        assert survived == 0
