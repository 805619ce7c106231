"""The facts that a pipeline's log can state, and the envelope that each stands in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from pendulum import DateTime

from arroyo_dagster.model import CheckpointBarrier, EpochSet, FileEntry, ObjectPath, Plan


@dataclass(frozen=True, slots=True)
class PipelineCreated:
    """The log begins. `life` is unique to it; the number of key groups is fixed for as long as it lasts."""

    life: str
    key_groups: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class CheckpointStarted:
    """An attempt at the next epoch is in flight, on top of `parent` (0: on nothing)."""

    barrier: CheckpointBarrier
    attempt: int
    parent: int
    plan: Plan
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """The commit point of state: from here on the epoch exists."""

    epoch: int
    attempt: int
    manifest: ObjectPath


@dataclass(frozen=True, slots=True)
class SinksCommitted:
    """Every sink shows the output of the head, this epoch, and of all of its ancestors, and of no other.

    `work` is the log entry that gave the sinks something to do: a completed checkpoint or a rewind.
    """

    epoch: int
    work: int


@dataclass(frozen=True, slots=True)
class SinksFailed:
    """The sinks could not do the work that log entry `work` gave them. It stays to be done."""

    work: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """The attempt is dead. The next one has the same epoch number and the same plan."""

    epoch: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CleanupStarted:
    """These epochs are gone from here on; deleting their `files` follows. The plan was made at entry `planned_at`."""

    planned_at: int
    min_epoch: int
    removes: EpochSet
    files: int
    bytes: int
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class CleanupCompleted:
    """What the cleaning that began at log entry `cleanup` has freed, and what it could not delete."""

    cleanup: int
    files: int
    bytes: int
    undeleted: tuple[ObjectPath, ...] = ()


@dataclass(frozen=True, slots=True)
class CleanupAborted:
    """The cleaning that began at log entry `cleanup` is dead. The next one deletes what it left."""

    cleanup: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayStarted:
    """An existing epoch is run again. `attempt` counts the pipeline's replays."""

    epoch: int
    attempt: int
    run_id: str | None = None


class ReplayOutcome(StrEnum):
    """How a replay ended."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReplayFinished:
    """A replay has ended. `details` name the tables and outputs that differ, or why it failed."""

    epoch: int
    attempt: int
    outcome: ReplayOutcome
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewound:
    """`to` (0: nothing at all) is the head again, and the output of its descendants is to be retracted.

    `supersedes` are all of these, also those that cleaning has removed: their output is still out there.
    """

    to: int
    supersedes: EpochSet
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class EpochPinned:
    """No rule removes this epoch while it is pinned."""

    epoch: int
    label: str


@dataclass(frozen=True, slots=True)
class EpochUnpinned:
    """The epoch is subject to the rules again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The next checkpoint is the last one until the pipeline is resumed."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last checkpoint is done; `epoch` is where the pipeline rests."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The pipeline goes on: a stop is taken back, and earlier failures are forgiven."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """In the epoch after `epoch`, the files `by` stand for the files `replaced` of one table."""

    epoch: int
    operator: str
    table: str
    replaced: tuple[ObjectPath, ...]
    by: tuple[FileEntry, ...]


Fact: TypeAlias = (
    PipelineCreated
    | CheckpointStarted
    | CheckpointCompleted
    | SinksCommitted
    | SinksFailed
    | CheckpointAborted
    | CleanupStarted
    | CleanupCompleted
    | CleanupAborted
    | ReplayStarted
    | ReplayFinished
    | Rewound
    | EpochPinned
    | EpochUnpinned
    | StopRequested
    | Stopped
    | Resumed
    | Compacted
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A fact at its place in the log. `writer` is unique to this one write."""

    sequence: int
    writer: str
    timestamp: DateTime
    fact: Fact
