"""What is pickled to the tasks of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arroyo_dagster.dataflow.graph import EventTime, MapBatches, WindowAggregate
from arroyo_dagster.dataflow.operator import Operator
from arroyo_dagster.dataflow.sink import Sink, SinkIdentity
from arroyo_dagster.dataflow.source import Source, Split
from arroyo_dagster.dataflow.watermarks import Clock
from arroyo_dagster.log import ObjectStorage, names, open_store
from arroyo_dagster.model import CheckpointBarrier, FileEntry, ObjectPath
from arroyo_dagster.operators.partials import Partials


@dataclass(frozen=True, slots=True)
class StateLocation:
    """Where a pipeline's state lies."""

    url: str
    options: Mapping[str, Any]
    pipeline: str

    def open(self) -> ObjectStorage:
        """Open the storage, narrowed to the pipeline."""
        return open_store(self.url, self.options or None).below(names.pipeline(self.pipeline))


@dataclass(frozen=True, slots=True)
class SinkTask:
    """A sink, and the functions on batches that come before it."""

    sink: Sink
    identity: SinkIdentity
    steps: tuple[MapBatches, ...] = ()


@dataclass(frozen=True, slots=True)
class LegTask:
    """One way into a stage. Each of `partitions` is read by one task; `clock` is None without event time.

    `token` is unique to this run of the stage.
    `event_time` is that of the source, to tell how far it has come. `first_steps` are done where rows are read,
    `last_steps` where they are sent; Spark's own steps lie between.
    """

    stage: str
    token: str
    number: int
    input: int
    origin: str
    from_source: bool
    source: Source
    partitions: tuple[tuple[Split, ...], ...]
    columns: tuple[str, ...] | None
    event_time: EventTime | None
    clock: Clock | None
    keys: tuple[str, ...]
    first_steps: tuple[MapBatches, ...]
    last_steps: tuple[MapBatches, ...]


@dataclass(frozen=True, slots=True)
class WindowTask:
    """How rows are aggregated before the shuffle, and where late ones go."""

    spec: WindowAggregate
    partials: Partials
    late: SinkTask | None


@dataclass(frozen=True, slots=True)
class StageTask:
    """A stage of one attempt.

    `watermark` is the operator's as the parent epoch left it, `tables` are the parent's files of its tables. A stage
    without an operator has one outlet, which takes the rows where they are read.
    """

    stage: str
    state: StateLocation
    barrier: CheckpointBarrier
    attempt: int
    prefix: ObjectPath
    parallelism: int
    key_groups: int
    legs: tuple[LegTask, ...]
    operator: Operator | None
    window: WindowTask | None
    watermark: int | None
    tables: Mapping[str, tuple[FileEntry, ...]]
    outlets: tuple[SinkTask, ...]
    exchanged: bool

    @property
    def directory(self) -> ObjectPath:
        """Where this stage may write."""
        return names.stage(self.prefix, self.stage)
