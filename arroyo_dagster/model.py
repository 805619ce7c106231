"""The vocabulary: barrier, epochs, plan, file and manifest records.

Everything here is an immutable value. Nothing here reads a clock, a disk or the network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import pendulum
from pendulum import DateTime

JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None


@dataclass(frozen=True, slots=True)
class CheckpointBarrier:
    """The end of an epoch, sent along every channel.

    `min_epoch` is the oldest epoch that the retention rule still keeps. With `then_stop` the pipeline
    rests after this epoch until it is resumed.
    """

    epoch: int
    min_epoch: int
    timestamp: DateTime
    then_stop: bool

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise ValueError(f"a barrier's epoch starts at 1, not at {self.epoch}")
        if not 0 <= self.min_epoch <= self.epoch:
            raise ValueError(
                f"a barrier's min_epoch lies between 0 and its epoch {self.epoch}, not at {self.min_epoch}"
            )
        if self.timestamp.tzinfo is None:
            raise ValueError(f"a barrier's timestamp needs a time zone, which {self.timestamp.isoformat()} lacks")


class ObjectPath(str):
    """The name of an object below its pipeline's prefix, which it cannot leave."""

    __slots__ = ()

    def __new__(cls, path: str) -> ObjectPath:
        """Refuse whatever is not plain segments joined by single slashes."""
        if any(segment in {"", ".", ".."} for segment in path.split("/")) or "\\" in path or not path.isprintable():
            raise ValueError(f"the path {path!r} is not a plain name below the pipeline's prefix")
        return super().__new__(cls, path)


@dataclass(frozen=True, slots=True)
class EpochSet:
    """A set of epochs as sorted, disjoint, inclusive ranges: ten thousand epochs in a row cost as much as one."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        previous = -1
        for first, last in self.ranges:
            if not 1 <= first <= last or first <= previous + 1:
                raise ValueError(f"epoch ranges must be sorted, apart and start at 1 or later: {self.ranges}")
            previous = last

    @classmethod
    def parse(cls, text: str) -> EpochSet:
        """Read what `str` writes: "3", "3-7", "1, 4-6, 9"."""
        ranges = []
        for part in text.split(","):
            first, dash, last = (word.strip() for word in part.partition("-"))
            if not (first.isdecimal() and (last.isdecimal() if dash else not last)) or int(first) > int(last or first):
                raise ValueError(f"{text!r} are no epochs: write 3, or 3-7, or 1, 4-6, 9")
            ranges.append((int(first), int(last or first)))
        return cls._joined(ranges)

    @classmethod
    def of(cls, epochs: Iterable[int]) -> EpochSet:
        """Collect single epochs, in any order."""
        return cls._joined((epoch, epoch) for epoch in epochs)

    def __contains__(self, epoch: int) -> bool:
        at = bisect_right(self.ranges, epoch, key=lambda span: span[0]) - 1
        return at >= 0 and epoch <= self.ranges[at][1]

    def __iter__(self) -> Iterator[int]:
        return (epoch for first, last in self.ranges for epoch in range(first, last + 1))

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __or__(self, other: EpochSet) -> EpochSet:
        return self._joined((*self.ranges, *other.ranges))

    def __sub__(self, other: EpochSet) -> EpochSet:
        kept: list[tuple[int, int]] = []
        for first, last in self.ranges:
            start = first
            for hole_first, hole_last in other.ranges:
                if hole_last < start or hole_first > last:
                    continue
                if start < hole_first:
                    kept.append((start, hole_first - 1))
                start = hole_last + 1
            if start <= last:
                kept.append((start, last))
        return EpochSet(tuple(kept))

    def __and__(self, other: EpochSet) -> EpochSet:
        return self - (self - other)

    def __str__(self) -> str:
        return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges) or "none"

    def after(self, epoch: int) -> EpochSet:
        """Those later than `epoch`."""
        return EpochSet(tuple((max(first, epoch + 1), last) for first, last in self.ranges if last > epoch))

    def before(self, epoch: int) -> int:
        """The newest one earlier than `epoch`; 0 when there is none."""
        return max((min(last, epoch - 1) for first, last in self.ranges if first < epoch), default=0)

    @staticmethod
    def _joined(ranges: Iterable[tuple[int, int]]) -> EpochSet:
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], last))
            else:
                joined.append((first, last))
        return EpochSet(tuple(joined))


@dataclass(frozen=True, slots=True)
class SourceRange:
    """What one epoch reads of one source: from `start` up to `end`, both in the source's own terms.

    `backlog` says that the source had more to give than an epoch may take.
    """

    start: JsonValue
    end: JsonValue
    backlog: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What an epoch reads, by source. Every attempt at the epoch reads just this."""

    sources: Mapping[str, SourceRange] = field(default_factory=dict)

    @property
    def backlog(self) -> bool:
        """Whether any source had more to give."""
        return any(source.backlog for source in self.sources.values())


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One immutable data file. Ranges are inclusive; times are microseconds since 1970, in UTC.

    `checksum` covers the file's bytes; `digest` covers its rows, whatever their order.
    """

    path: ObjectPath
    rows: int
    bytes: int
    key_groups: tuple[int, int] | None
    times: tuple[int, int] | None
    checksum: str
    digest: str


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The live files of one operator's state table."""

    operator: str
    table: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class StagedOutput:
    """What one sink has to publish for an epoch. The paths are the sink's, not the pipeline's."""

    sink: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """What an epoch found in one source.

    `watermark` is in microseconds since 1970. `active_at` is the timestamp of the last barrier that had rows of this
    source before it, or of the first barrier ever. `quarantined` names the inputs that were left out.
    """

    source: str
    rows: int
    watermark: int | None
    active_at: DateTime
    quarantined: tuple[str, ...] = ()

    def joined(self, other: SourceRecord) -> SourceRecord:
        """What two readers of the same source have found, who may look at different columns."""
        marks = [mark for mark in (self.watermark, other.watermark) if mark is not None]
        return SourceRecord(
            self.source,
            max(self.rows, other.rows),
            max(marks, default=None),
            max(self.active_at, other.active_at),
            tuple(sorted({*self.quarantined, *other.quarantined})),
        )


@dataclass(frozen=True, slots=True)
class SubtaskRecord:
    """How much of an operator's work one subtask did."""

    rows_in: int
    rows_out: int


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """What one operator did in an epoch. `skipped` are the subtasks whose state was carried forward unchanged.

    `subtasks` are in the order of their indices; there are none when the operator was not part of the pipeline.
    """

    operator: str
    parallelism: int
    watermark: int | None
    rows_in: int
    rows_out: int
    late_rows: int
    skipped: tuple[int, ...] = ()
    metrics: Mapping[str, int] = field(default_factory=dict)
    subtasks: tuple[SubtaskRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """How long one step of one subtask took: `start` and `micros` in microseconds, since 1970 and since then."""

    stage: str
    subtask: int
    step: str
    start: int
    micros: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one attempt: enough to restore every table, publish every output and replay the epoch."""

    barrier: CheckpointBarrier
    attempt: int
    parent: int
    plan: Plan
    tables: tuple[TableFiles, ...]
    staged: tuple[StagedOutput, ...] = ()
    sources: tuple[SourceRecord, ...] = ()
    operators: tuple[OperatorRecord, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def epoch(self) -> int:
        """The epoch that this attempt is at."""
        return self.barrier.epoch

    @property
    def files(self) -> Iterator[FileEntry]:
        """Every file of state that this manifest names."""
        for table in self.tables:
            yield from table.files


def to_micros(time: DateTime) -> int:
    """A time as microseconds since 1970."""
    return time.int_timestamp * 1_000_000 + time.microsecond


def from_micros(micros: int) -> DateTime:
    """Microseconds since 1970 as a time in UTC."""
    seconds, rest = divmod(micros, 1_000_000)
    return pendulum.from_timestamp(seconds, "UTC").add(microseconds=rest)
