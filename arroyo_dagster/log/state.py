"""A pipeline's state: the pure fold of its log.

The state stays small however long the log is. Epochs are ranges, and whatever holds for one epoch only
(a pin, a second attempt) leaves with that epoch. Times and files of an epoch are in its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar, assert_never

from pendulum import DateTime

from arroyo_dagster.log import names
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    CleanupAborted,
    CleanupCompleted,
    CleanupStarted,
    Compacted,
    Entry,
    EpochPinned,
    EpochUnpinned,
    PipelineCreated,
    ReplayFinished,
    ReplayOutcome,
    ReplayStarted,
    Resumed,
    Rewound,
    SinksCommitted,
    SinksFailed,
    Stopped,
    StopRequested,
)
from arroyo_dagster.model import EpochSet, ObjectPath, Plan

V = TypeVar("V")


class Mode(StrEnum):
    """What the user wants of the pipeline."""

    RUNNING = "running"
    STOP_REQUESTED = "stop requested"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Failures:
    """How often in a row something has failed."""

    count: int = 0
    reason: str = ""
    at: DateTime | None = None

    def and_another(self, reason: str, at: DateTime) -> Failures:
        """Count one more."""
        return Failures(self.count + 1, reason, at)


@dataclass(frozen=True, slots=True)
class CheckpointInFlight:
    """The one attempt that may complete."""

    started: CheckpointStarted
    at: DateTime


@dataclass(frozen=True, slots=True)
class SinkWork:
    """What the sinks still have to do before they show exactly the head and its ancestors.

    `entry` is the log entry that gave them this to do.
    """

    entry: int
    publish: int | None
    retract: EpochSet
    run_id: str | None
    since: DateTime
    failures: Failures = Failures()


@dataclass(frozen=True, slots=True)
class CleanupInFlight:
    """The one cleaning that may complete, known by the number of its log entry."""

    cleanup: int
    run_id: str | None
    at: DateTime


@dataclass(frozen=True, slots=True)
class ReplayInFlight:
    """A replay that has not ended."""

    started: ReplayStarted
    at: DateTime


@dataclass(frozen=True, slots=True)
class PipelineState:
    """Everything the log says that still matters.

    `sequence` and `writer` are those of the last entry, and so tell two histories apart.
    `line` is the head and all of its ancestors, `kept` are the epochs whose files are all there: those of the line
    are live, the others were superseded by a rewind. `attempts` counts the attempts made at the next epoch, which
    must follow `plan` if there is one. Kept epochs are `verified` if their latest replay was identical, `differing` if
    it was not. `final` says that the head was taken to stop at.
    """

    sequence: int = 0
    writer: str = ""
    life: str = ""
    key_groups: int = 0
    fingerprint: str = ""
    mode: Mode = Mode.RUNNING

    last_epoch: int = 0
    min_epoch: int = 0
    line: EpochSet = EpochSet()
    kept: EpochSet = EpochSet()
    retried: Mapping[int, int] = field(default_factory=dict)
    pins: Mapping[int, str] = field(default_factory=dict)

    completed_at: DateTime | None = None
    final: bool = False
    backlog: bool = False
    attempts: int = 0
    plan: Plan | None = None
    compactions: tuple[Compacted, ...] = ()
    failures: Failures = Failures()

    in_flight: CheckpointInFlight | None = None
    sinks: SinkWork | None = None
    cleanup: CleanupInFlight | None = None
    cleanup_failures: Failures = Failures()
    replays: tuple[ReplayInFlight, ...] = ()
    replays_started: int = 0
    verified: EpochSet = EpochSet()
    differing: EpochSet = EpochSet()

    @property
    def created(self) -> bool:
        """Whether the log has begun."""
        return self.sequence > 0

    @property
    def head(self) -> int:
        """The epoch that the next one will be taken on top of; 0 for nothing."""
        return self.line.before(self.next_epoch)

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the next checkpoint is at."""
        return self.last_epoch + 1

    @property
    def live(self) -> EpochSet:
        """The head and those of its ancestors that are kept: what can be rewound to."""
        return self.line & self.kept

    @property
    def superseded(self) -> EpochSet:
        """Kept epochs that a rewind has left behind."""
        return self.kept - self.line

    @property
    def needed_by_sinks(self) -> EpochSet:
        """Kept epochs that the sinks are not done with."""
        if self.sinks is None:
            return EpochSet()
        return (self.sinks.retract | EpochSet.of([self.sinks.publish] if self.sinks.publish else [])) & self.kept

    def parent_of(self, epoch: int) -> int:
        """The epoch that a live one was taken on top of, kept or not; 0 for nothing."""
        return self.line.before(epoch)

    def attempt_of(self, epoch: int) -> int:
        """The attempt that completed a kept epoch."""
        return self.retried.get(epoch, 1)

    def manifest_of(self, epoch: int) -> ObjectPath:
        """The name of a kept epoch's manifest."""
        return names.manifest(epoch, self.attempt_of(epoch))


def apply(state: PipelineState, entry: Entry) -> PipelineState:
    """Fold one entry into the state. The entry must be one that `invariants.refusal` lets pass."""
    match entry.fact:
        case PipelineCreated(life, key_groups, fingerprint):
            state = replace(state, life=life, key_groups=key_groups, fingerprint=fingerprint)
        case CheckpointStarted() | CheckpointCompleted() | CheckpointAborted():
            state = _apply_checkpoint(state, entry.fact, entry)
        case SinksCommitted():
            state = replace(state, sinks=None)
        case SinksFailed(reason=reason):
            assert state.sinks is not None
            failures = state.sinks.failures.and_another(reason, entry.timestamp)
            state = replace(state, sinks=replace(state.sinks, failures=failures))
        case CleanupStarted() | CleanupCompleted() | CleanupAborted() | Compacted():
            state = _apply_cleanup(state, entry.fact, entry)
        case ReplayStarted() as started:
            replays = (*state.replays, ReplayInFlight(started, entry.timestamp))
            state = replace(state, replays=replays, replays_started=started.attempt)
        case ReplayFinished() as finished:
            state = _apply_replayed(state, finished)
        case Rewound() as rewound:
            state = _apply_rewound(state, rewound, entry)
        case EpochPinned(epoch, label):
            state = replace(state, pins={**state.pins, epoch: label})
        case EpochUnpinned(epoch):
            state = replace(state, pins=_without(state.pins, EpochSet.of([epoch])))
        case StopRequested():
            state = replace(state, mode=Mode.STOP_REQUESTED)
        case Stopped():
            state = replace(state, mode=Mode.STOPPED)
        case Resumed():
            sinks = replace(state.sinks, failures=Failures()) if state.sinks else None
            state = replace(state, mode=Mode.RUNNING, final=False, failures=Failures(), sinks=sinks)
        case _:
            assert_never(entry.fact)
    return replace(state, sequence=entry.sequence, writer=entry.writer)


def _apply_checkpoint(
    state: PipelineState, fact: CheckpointStarted | CheckpointCompleted | CheckpointAborted, entry: Entry
) -> PipelineState:
    at = entry.timestamp
    match fact:
        case CheckpointStarted():
            in_flight = CheckpointInFlight(fact, at)
            return replace(state, in_flight=in_flight, attempts=fact.attempt, plan=fact.plan)
        case CheckpointAborted():
            return replace(state, in_flight=None, failures=state.failures.and_another(fact.reason, at))
        case CheckpointCompleted(epoch, attempt):
            assert state.in_flight is not None
            started = state.in_flight.started
            return replace(
                state,
                last_epoch=epoch,
                line=state.line | EpochSet.of([epoch]),
                kept=state.kept | EpochSet.of([epoch]),
                retried=state.retried if attempt == 1 else {**state.retried, epoch: attempt},
                completed_at=at,
                final=started.barrier.then_stop and state.mode is Mode.STOP_REQUESTED,
                backlog=started.plan.backlog,
                attempts=0,
                plan=None,
                compactions=(),
                failures=Failures(),
                in_flight=None,
                sinks=SinkWork(entry.sequence, publish=epoch, retract=EpochSet(), run_id=started.run_id, since=at),
            )
        case _:
            assert_never(fact)


def _apply_cleanup(
    state: PipelineState, fact: CleanupStarted | CleanupCompleted | CleanupAborted | Compacted, entry: Entry
) -> PipelineState:
    match fact:
        case CleanupStarted():
            return replace(
                state,
                cleanup=CleanupInFlight(entry.sequence, fact.run_id, entry.timestamp),
                min_epoch=fact.min_epoch,
                kept=state.kept - fact.removes,
                retried=_without(state.retried, fact.removes),
                verified=state.verified - fact.removes,
                differing=state.differing - fact.removes,
            )
        case CleanupCompleted():
            return replace(state, cleanup=None, cleanup_failures=Failures())
        case CleanupAborted():
            failures = state.cleanup_failures.and_another(fact.reason, entry.timestamp)
            return replace(state, cleanup=None, cleanup_failures=failures)
        case Compacted():
            return replace(state, compactions=(*state.compactions, fact))
        case _:
            assert_never(fact)


def _apply_replayed(state: PipelineState, finished: ReplayFinished) -> PipelineState:
    replays = tuple(replay for replay in state.replays if replay.started.attempt != finished.attempt)
    state, epoch = replace(state, replays=replays), EpochSet.of([finished.epoch])
    match finished.outcome:
        case ReplayOutcome.IDENTICAL:
            return replace(state, verified=state.verified | epoch, differing=state.differing - epoch)
        case ReplayOutcome.DIFFERENT:
            return replace(state, verified=state.verified - epoch, differing=state.differing | epoch)
        case ReplayOutcome.FAILED:
            return state
        case _:
            assert_never(finished.outcome)


def _apply_rewound(state: PipelineState, rewound: Rewound, entry: Entry) -> PipelineState:
    pending = state.sinks
    sinks = SinkWork(
        entry.sequence,
        publish=rewound.to if pending and pending.publish == rewound.to else None,
        retract=(pending.retract if pending else EpochSet()) | rewound.supersedes,
        run_id=rewound.run_id,
        since=entry.timestamp,
    )
    return replace(
        state,
        line=state.line - rewound.supersedes,
        final=False,
        backlog=state.backlog or bool(rewound.supersedes),
        plan=None,
        compactions=(),
        failures=Failures(),
        sinks=sinks,
    )


def _without(mapping: Mapping[int, V], epochs: EpochSet) -> dict[int, V]:
    return {epoch: value for epoch, value in mapping.items() if epoch not in epochs}
