"""What a source owes a pipeline: the same rows for the same offsets, every time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster.model import JsonValue


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far one epoch reads. `backlog` says that the source had more to give than an epoch may take."""

    end: JsonValue
    backlog: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source that one task reads alone. `weight` tells how much work it is, beside the others."""

    value: JsonValue
    weight: int = 1


@dataclass(slots=True)
class ReadReport:
    """What a source noticed while it read, for the epoch's record: inputs that it could not read and left out."""

    quarantined: list[str] = field(default_factory=list)


class Source(ABC):
    """Rows that are known by their offsets.

    `latest` is asked once, on the driver, before an epoch begins, and its answer is written into the log. Every
    attempt at that epoch, and every replay of it, then calls `splits` with the same offsets on the driver and `read`
    for each split in a task, and must get the same rows. Offsets are JSON; None is the beginning. A source is
    pickled to the tasks, so it holds its configuration and nothing else.
    """

    kind: str = ""
    """What it reads, as Dagster's asset graph shows it: parquet, csv, kafka, ..."""
    url: str | None = None
    """Where that is, for people."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema | None:
        """The rows' schema; None when only the data can tell, and then `schema_at` must."""

    def schema_at(self, end: JsonValue) -> pa.Schema | None:
        """The rows' schema as far as it is known at that offset; None while there have been no rows at all."""
        return self.schema

    @abstractmethod
    def latest(self, start: JsonValue, now: DateTime) -> Offsets:
        """Tell how far the next epoch should read. An end that equals `start` means that there is nothing new."""

    @abstractmethod
    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        """Cut what lies between two offsets into parts that can be read side by side, in a stable order."""

    @abstractmethod
    def read(self, split: Split, columns: Sequence[str] | None, report: ReadReport) -> Iterator[pa.RecordBatch]:
        """Read a split, in a task, in a stable order; only `columns` if they are given."""
