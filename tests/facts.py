"""Legal facts for a given state, with the least that a test has to say."""

import pendulum
from pendulum import DateTime

from arroyo_dagster.log import Appended, Log, Mode, PipelineState, names
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    CleanupStarted,
    Entry,
    Fact,
    PipelineCreated,
    ReplayStarted,
    Rewound,
    SinksCommitted,
)
from arroyo_dagster.log.invariants import refusal
from arroyo_dagster.log.state import apply
from arroyo_dagster.model import CheckpointBarrier, EpochSet, FileEntry, ObjectPath, Plan, SourceRange

NOON = pendulum.datetime(2026, 11, 18, 12)
CREATED = PipelineCreated(life="life", key_groups=128, fingerprint="f")


def started(
    state: PipelineState, *, plan: Plan | None = None, run_id: str | None = None, at: DateTime = NOON
) -> CheckpointStarted:
    barrier = CheckpointBarrier(state.next_epoch, state.min_epoch, at, state.mode is Mode.STOP_REQUESTED)
    plan = state.plan or plan or Plan({"bids": SourceRange(state.head, state.next_epoch)})
    return CheckpointStarted(barrier, state.attempts + 1, state.head, plan, run_id)


def completed(state: PipelineState) -> CheckpointCompleted:
    assert state.in_flight
    epoch, attempt = state.in_flight.started.barrier.epoch, state.in_flight.started.attempt
    return CheckpointCompleted(epoch, attempt, names.manifest(epoch, attempt))


def aborted(state: PipelineState, reason: str = "the disk was full") -> CheckpointAborted:
    assert state.in_flight
    return CheckpointAborted(state.in_flight.started.barrier.epoch, state.in_flight.started.attempt, reason)


def rewound(state: PipelineState, to: int, run_id: str | None = None) -> Rewound:
    return Rewound(to, state.line.after(to), run_id)


def cleanup(state: PipelineState, *removes: int, run_id: str | None = None) -> CleanupStarted:
    min_epoch = max([state.min_epoch, *removes])
    return CleanupStarted(state.sequence, min_epoch, EpochSet.of(removes), len(removes), 0, run_id)


def committed(state: PipelineState) -> SinksCommitted:
    assert state.sinks
    return SinksCommitted(state.head, state.sinks.entry)


def replay(state: PipelineState, epoch: int, run_id: str | None = None) -> ReplayStarted:
    return ReplayStarted(epoch, state.replays_started + 1, run_id)


def file(path: str, size: int = 10) -> FileEntry:
    return FileEntry(ObjectPath(path), 1, size, (0, 127), None, "c", "d")


def after(state: PipelineState, *facts: Fact, at: DateTime = NOON) -> PipelineState:
    """Fold facts that must be legal."""
    for fact in facts:
        assert refusal(state, fact) is None, refusal(state, fact)
        state = apply(state, Entry(state.sequence + 1, f"test/{state.sequence + 1}", at, fact))
    return state


def with_epochs(count: int, state: PipelineState | None = None, at: DateTime = NOON) -> PipelineState:
    """Fold so many whole epochs, on a new pipeline unless a state is given."""
    state = state or after(PipelineState(), CREATED, at=at)
    for _ in range(count):
        state = after(state, started(state, at=at), at=at)
        state = after(state, completed(state), at=at)
        state = after(state, committed(state), at=at)
    return state


def append(log: Log, fact: Fact) -> PipelineState:
    """Append a fact that must get in."""
    outcome = log.append(log.read(), fact)
    assert isinstance(outcome, Appended), outcome
    return outcome.state


def append_epoch(log: Log) -> PipelineState:
    """Append one whole epoch."""
    append(log, started(log.read()))
    append(log, completed(log.read()))
    return append(log, committed(log.read()))
