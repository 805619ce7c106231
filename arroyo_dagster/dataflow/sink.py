"""What a sink owes a pipeline: output that appears once, after its epoch is committed, and can be taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from arroyo_dagster.model import EpochSet, FileEntry


@dataclass(frozen=True, slots=True)
class SinkIdentity:
    """Which sink of which pipeline this is. `life` is unique to the pipeline's log, and new if that is begun anew."""

    pipeline: str
    sink: str
    life: str


class StagedWriter(ABC):
    """Takes one task's rows of one epoch. Nothing of them shows before they are published."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows."""

    @abstractmethod
    def close(self) -> tuple[FileEntry, ...]:
        """Make everything durable, and tell which files were written; none when there were no rows."""


class Sink(ABC):
    """Output in two phases.

    In the tasks of an epoch, `writer` takes rows into files that nobody sees. Once the epoch is committed, the driver
    calls `publish` with the files of the tasks that won. Both may be tried again after a crash at any
    instruction, and two processes may do so at once: doing it twice is the same as doing it once. An epoch that
    was retracted is never published again. A sink is pickled to the tasks, so it holds its configuration and
    nothing else.
    """

    kind: str = ""
    """What it writes to, as Dagster's asset graph shows it: deltalake, parquet, postgres, ..."""
    url: str | None = None
    """Where that is, for people."""

    @abstractmethod
    def writer(self, identity: SinkIdentity, epoch: int, attempt: int, name: str) -> StagedWriter:
        """Open a writer in a task. `name` is unique to this try of this task."""

    @abstractmethod
    def publish(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> None:
        """Let the epoch's output appear."""

    @abstractmethod
    def retract(self, identity: SinkIdentity, epochs: EpochSet) -> None:
        """Take the output of these epochs back, published or not, and see to it that it never comes again."""

    def heal(
        self, identity: SinkIdentity, epoch: int, published: Sequence[FileEntry], files: Sequence[FileEntry]
    ) -> None:
        """Publish an epoch again. `files`, of a replay, have the same rows as `published`, of which some are lost."""
        self.publish(identity, epoch, files)

    @abstractmethod
    def discard(self, identity: SinkIdentity, files: Sequence[FileEntry]) -> None:
        """Delete what a replay has staged and nobody will publish."""

    @abstractmethod
    def missing(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> Sequence[str]:
        """Name what should be there of a published epoch and is not, or is damaged; for `verify`."""
