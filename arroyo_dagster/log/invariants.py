"""What must hold for a fact to enter the log: plain predicates over the state before it.

1. At most one checkpoint is in flight.
2. No checkpoint starts while cleaning is in flight, nor the reverse; no cleaning while a replay is.
3. Epoch numbers grow by one; a parent is the head at its start.
4. Only the attempt that the log says is in flight can complete: a zombie run loses.
5. An epoch is removed only if it is neither the head, nor pinned, nor needed by sinks, while no attempt is in flight
   that could name its files. `retention.plan_cleanup` sees to the files that epochs share.
6. Sinks commit only what is completed, and in order: no checkpoint starts before they have caught up with the head.
7. An unclear write is read back before anything is concluded: `Log.append` sees to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from arroyo_dagster.log import names
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    CleanupAborted,
    CleanupCompleted,
    CleanupStarted,
    Compacted,
    EpochPinned,
    EpochUnpinned,
    Fact,
    PipelineCreated,
    ReplayFinished,
    ReplayStarted,
    Resumed,
    Rewound,
    SinksCommitted,
    SinksFailed,
    Stopped,
    StopRequested,
)
from arroyo_dagster.log.state import CheckpointInFlight, Mode, PipelineState
from arroyo_dagster.model import EpochSet


def refusal(state: PipelineState, fact: Fact) -> str | None:
    """Say in one sentence why `fact` cannot be the next entry, or None when it can."""
    return next(_objections(state, fact), None)


def _objections(state: PipelineState, fact: Fact) -> Iterator[str]:
    if state.created == isinstance(fact, PipelineCreated):
        yield "the pipeline exists already" if state.created else "the pipeline has not been created yet"
    match fact:
        case PipelineCreated(key_groups=key_groups):
            if key_groups < 1:
                yield f"a pipeline needs at least one key group, not {key_groups}"
        case CheckpointStarted():
            yield from _against_starting(state, fact)
        case CheckpointCompleted(epoch, attempt, manifest):
            yield from _against_ending(state, epoch, attempt)
            if manifest != names.manifest(epoch, attempt):
                yield f"the manifest of epoch {epoch} is {names.manifest(epoch, attempt)}, not {manifest}"
        case CheckpointAborted(epoch, attempt):
            yield from _against_ending(state, epoch, attempt)
        case SinksCommitted() | SinksFailed():
            yield from _against_sinks(state, fact)
        case CleanupStarted():
            yield from _against_cleaning(state, fact)
        case CleanupCompleted(cleanup) | CleanupAborted(cleanup):
            if state.cleanup is None or state.cleanup.cleanup != cleanup:
                yield f"cleaning {cleanup} is not in flight"
        case ReplayStarted() | ReplayFinished():
            yield from _against_replay(state, fact)
        case Rewound():
            yield from _against_rewinding(state, fact)
        case EpochPinned(epoch):
            if epoch not in state.kept:
                yield f"epoch {epoch} does not exist; kept are {state.kept}"
        case EpochUnpinned(epoch):
            if epoch not in state.pins:
                yield f"epoch {epoch} is not pinned; pinned are {EpochSet.of(state.pins)}"
        case StopRequested() | Stopped() | Resumed():
            yield from _against_mode(state, fact)
        case Compacted():
            yield from _against_compacting(state, fact)
        case _:
            assert_never(fact)


def _against_starting(state: PipelineState, start: CheckpointStarted) -> Iterator[str]:
    barrier = start.barrier
    if state.in_flight:
        yield _in_flight(state.in_flight)
    if state.cleanup:
        yield f"cleaning {state.cleanup.cleanup} is in flight"
    if state.sinks:
        yield f"the sinks have not caught up with epoch {state.head}"
    if state.mode is Mode.STOPPED:
        yield f"the pipeline is stopped at epoch {state.head}"
    if (barrier.epoch, start.attempt) != (state.next_epoch, state.attempts + 1):
        yield (
            f"the next attempt is number {state.attempts + 1} at epoch {state.next_epoch}, "
            f"not number {start.attempt} at epoch {barrier.epoch}"
        )
    if start.parent != state.head:
        yield f"the parent of epoch {barrier.epoch} is the head, epoch {state.head}, not epoch {start.parent}"
    if barrier.min_epoch != state.min_epoch:
        yield f"the oldest epoch that the rules keep is {state.min_epoch}, not {barrier.min_epoch}"
    if barrier.then_stop != (state.mode is Mode.STOP_REQUESTED):
        yield f"the barrier says then_stop={barrier.then_stop}, but the pipeline is {state.mode}"
    if state.plan is not None and state.plan != start.plan:
        yield f"epoch {barrier.epoch} has a plan from an earlier attempt, and every attempt follows it"


def _against_ending(state: PipelineState, epoch: int, attempt: int) -> Iterator[str]:
    running = state.in_flight
    if running is None:
        yield f"attempt {attempt} at epoch {epoch} is not in flight: none is, and the head is epoch {state.head}"
    elif (running.started.barrier.epoch, running.started.attempt) != (epoch, attempt):
        yield f"attempt {attempt} at epoch {epoch} is not in flight: {_in_flight(running)}"


def _against_sinks(state: PipelineState, fact: SinksCommitted | SinksFailed) -> Iterator[str]:
    if state.sinks is None:
        yield f"the sinks have nothing to do; the head is epoch {state.head}"
    elif fact.work != state.sinks.entry:
        yield f"the sinks have work from entry {state.sinks.entry}, no longer from entry {fact.work}"
    elif isinstance(fact, SinksCommitted) and fact.epoch != state.head:
        yield f"the sinks have to catch up with the head, epoch {state.head}, not with epoch {fact.epoch}"


def _against_compacting(state: PipelineState, compacted: Compacted) -> Iterator[str]:
    if state.in_flight:
        yield _in_flight(state.in_flight)
    if state.head == 0 or compacted.epoch != state.head:
        yield f"epoch {compacted.epoch} was compacted, but the head is epoch {state.head}"
    for earlier in state.compactions:
        if twice := sorted({*earlier.replaced} & {*compacted.replaced}):
            yield f"{twice[0]} was compacted already"


def _against_cleaning(state: PipelineState, start: CleanupStarted) -> Iterator[str]:
    if state.in_flight:
        yield _in_flight(state.in_flight)
    if state.cleanup:
        yield f"cleaning {state.cleanup.cleanup} is in flight"
    if state.replays:
        yield _replaying(state)
    if start.planned_at != state.sequence:
        yield f"the plan was made at entry {start.planned_at}, but the log is at entry {state.sequence}: plan again"
    if not state.min_epoch <= start.min_epoch <= state.last_epoch:
        yield f"min_epoch goes from {state.min_epoch} to at most {state.last_epoch}, not to {start.min_epoch}"
    if absent := start.removes - state.kept:
        yield f"epochs {absent} are not there to be removed"
    needed = EpochSet.of([*state.pins, *([state.head] if state.head else [])]) | state.needed_by_sinks
    if needed & start.removes:
        yield f"epochs {needed & start.removes} are the head, pinned or needed by sinks"


def _against_replay(state: PipelineState, fact: ReplayStarted | ReplayFinished) -> Iterator[str]:
    if isinstance(fact, ReplayFinished):
        if not any((r.started.epoch, r.started.attempt) == (fact.epoch, fact.attempt) for r in state.replays):
            yield f"replay {fact.attempt} of epoch {fact.epoch} is not in flight"
        return
    if state.cleanup:
        yield f"cleaning {state.cleanup.cleanup} is in flight"
    if fact.epoch not in state.live:
        yield f"epoch {fact.epoch} cannot be replayed; live epochs are {state.live}"
    elif (parent := state.parent_of(fact.epoch)) and parent not in state.kept:
        yield f"epoch {fact.epoch} cannot be replayed: cleaning has removed its parent, epoch {parent}"
    if fact.attempt != state.replays_started + 1:
        yield f"the next replay is number {state.replays_started + 1}, not {fact.attempt}"


def _against_rewinding(state: PipelineState, rewound: Rewound) -> Iterator[str]:
    if state.in_flight:
        yield _in_flight(state.in_flight)
    if state.replays:
        yield _replaying(state)
    if rewound.to != 0 and rewound.to not in state.live:
        yield f"epoch {rewound.to} cannot be rewound to; live epochs are {state.live}"
    if rewound.supersedes != state.line.after(rewound.to):
        yield f"a rewind to epoch {rewound.to} supersedes {state.line.after(rewound.to)}, not {rewound.supersedes}"


def _against_mode(state: PipelineState, fact: StopRequested | Stopped | Resumed) -> Iterator[str]:
    match fact:
        case StopRequested():
            if state.mode is not Mode.RUNNING:
                yield f"the pipeline is already {state.mode}"
        case Stopped(epoch):
            if state.mode is not Mode.STOP_REQUESTED:
                yield f"the pipeline is {state.mode}"
            if state.in_flight:
                yield _in_flight(state.in_flight)
            if state.sinks or not state.final or epoch != state.head:
                yield f"the last checkpoint before the stop is not done; the head is epoch {state.head}"
        case Resumed():
            failing = state.failures.count or (state.sinks and state.sinks.failures.count)
            if state.mode is Mode.RUNNING and not failing:
                yield "the pipeline is running"
        case _:
            assert_never(fact)


def _in_flight(running: CheckpointInFlight) -> str:
    return f"attempt {running.started.attempt} at epoch {running.started.barrier.epoch} is in flight"


def _replaying(state: PipelineState) -> str:
    return f"replays of epochs {EpochSet.of(replay.started.epoch for replay in state.replays)} are in flight"
