"""A pipeline's dataflow as plain values: where streams come from, what happens to them, where they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from arroyo_dagster.dataflow.agg import Aggregate
from arroyo_dagster.dataflow.operator import Operator
from arroyo_dagster.dataflow.sink import Sink
from arroyo_dagster.dataflow.source import Source

Fields: TypeAlias = Mapping[str, pa.DataType | None]
"""The columns of a stream as far as they are known before Spark has seen it; None for a type that is not."""


@dataclass(frozen=True, slots=True)
class EventTime:
    """Which column tells when a row happened. `shift`, in microseconds, is added to it."""

    column: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Where:
    """Keep the rows that meet a condition in Spark SQL."""

    condition: str


@dataclass(frozen=True, slots=True)
class Select:
    """Keep columns, or expressions in Spark SQL."""

    expressions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WithColumns:
    """Add or replace columns by expressions in Spark SQL."""

    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sql:
    """A query over the table `rows`, in Spark SQL, that looks at one row at a time."""

    query: str


@dataclass(frozen=True, slots=True)
class MapBatches:
    """A function from Arrow batch to Arrow batch. Without a schema, its output has the columns of its input."""

    function: Callable[[pa.RecordBatch], pa.RecordBatch]
    schema: pa.Schema | None


SparkStep: TypeAlias = Where | Select | WithColumns | Sql
Step: TypeAlias = SparkStep | MapBatches


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A source. `delay` and `idle_after` are in microseconds."""

    name: str
    source: Source
    event_time: EventTime | None
    delay: int
    idle_after: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A stream after one stateless step."""

    parent: Expression
    step: Step


@dataclass(frozen=True, slots=True)
class Union:
    """Streams as one."""

    parents: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class WindowAggregate:
    """Aggregates by key and tumbling window of `size` microseconds."""

    keys: tuple[str, ...]
    size: int
    event_time: EventTime
    aggregates: tuple[tuple[str, Aggregate], ...]


@dataclass(frozen=True, slots=True)
class Inlet:
    """One input of an operator. Without keys, a single subtask gets every row."""

    stream: Expression
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """A stateful operator. `late_to` names the sink for rows that come too late, `fields` are what it emits."""

    name: str
    operator: Operator | WindowAggregate
    inlets: tuple[Inlet, ...]
    late_to: str | None = None
    fields: Fields | None = None

    @property
    def keyed(self) -> bool:
        """Whether rows are spread over subtasks by key."""
        return bool(self.inlets[0].keys)


Expression: TypeAlias = SourceNode | Stepped | Union | OperatorNode


@dataclass(frozen=True, slots=True)
class SinkNode:
    """A sink; one for late rows has no stream of its own."""

    name: str
    sink: Sink
    stream: Expression | None
    fields: Fields | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Everything that a pipeline consists of, in the order in which it was declared."""

    sources: tuple[SourceNode, ...]
    operators: tuple[OperatorNode, ...]
    sinks: tuple[SinkNode, ...]

    def source(self, name: str) -> SourceNode | None:
        """The source of that name."""
        return next((node for node in self.sources if node.name == name), None)

    def sink(self, name: str) -> SinkNode:
        """The sink of that name."""
        return next(node for node in self.sinks if node.name == name)
