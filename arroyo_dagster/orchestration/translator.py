"""How a pipeline's nodes look as Dagster assets. Override `Translator.get_asset_spec` to have it your way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

import dagster as dg
import pendulum
import pyarrow as pa

from arroyo_dagster.dataflow import GlobalTable, KeyedTable, Operator, Pipeline, TimeTable
from arroyo_dagster.dataflow.graph import (
    Expression,
    Fields,
    MapBatches,
    OperatorNode,
    Select,
    SinkNode,
    SourceNode,
    Sql,
    Step,
    Stepped,
    Union,
    Where,
    WithColumns,
)
from arroyo_dagster.dataflow.tables import TableSpec
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.orchestration.deployment import partitions_of

Node: TypeAlias = SourceNode | OperatorNode | SinkNode


@dataclass(frozen=True, slots=True)
class AssetNode:
    """A source, an operator or a sink of a pipeline, and the assets that it reads from."""

    pipeline: Pipeline
    node: Node
    deps: tuple[dg.AssetKey, ...]

    @property
    def key(self) -> dg.AssetKey:
        """Its asset key, if nobody wants another: the pipeline's name and its own."""
        return dg.AssetKey([self.pipeline.name, self.node.name])


class Translator:
    """Tells how nodes look as assets.

    Override `get_asset_spec`, and change what `super().get_asset_spec(node)` returns with its `replace_attributes` or
    `merge_attributes`: the key, group, owners, tags, description, metadata, automation. Sources are external assets;
    operators and sinks must keep their partitions, which are the epochs.
    """

    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        """The spec of one node."""
        kinds, fields, uri = _kinds(node.node), _fields(node.node), _url(node.node)
        metadata: dict[str, Any] = {}
        if fields:
            metadata["dagster/column_schema"] = column_schema(fields)
        if uri:
            metadata["dagster/uri"] = uri
        return dg.AssetSpec(
            node.key,
            deps=node.deps,
            description=describe(node.node),
            group_name=node.pipeline.name,
            kinds=kinds,
            metadata=metadata,
            partitions_def=None if isinstance(node.node, SourceNode) else partitions_of(node.pipeline),
        )


def specs_of(pipeline: Pipeline, translator: Translator) -> dict[str, dg.AssetSpec]:
    """The spec of every node, by its name; each depends on those that it reads from, whatever they are called."""
    graph = pipeline.graph()
    specs: dict[str, dg.AssetSpec] = {}
    late = {node.late_to: node.name for node in graph.operators if node.late_to}
    nodes: tuple[Node, ...] = (*graph.sources, *graph.operators, *graph.sinks)
    for node in nodes:
        origins = dict.fromkeys([late[node.name]] if node.name in late else _origins(node))
        spec = translator.get_asset_spec(AssetNode(pipeline, node, tuple(specs[name].key for name in origins)))
        if not isinstance(node, SourceNode) and spec.partitions_def != partitions_of(pipeline):
            raise ConfigurationError(
                f"pipeline {pipeline.name!r}: the translator took away the partitions of {node.name!r}, which are its "
                "epochs: leave partitions_def as it is"
            )
        specs[node.name] = spec
    return specs


def column_schema(fields: Fields) -> dg.TableSchema:
    """Columns as Dagster shows them; of some the type is known only once Spark has seen the data."""
    return dg.TableSchema(
        [dg.TableColumn(name, "unknown" if kind is None else str(kind)) for name, kind in fields.items()]
    )


def describe(node: Node) -> str:
    """What a node does, for a person who has not seen the code."""
    match node:
        case SourceNode():
            time = (
                f"Event time is `{node.event_time.column}`, up to {_words(node.delay)} late." if node.event_time else ""
            )
            return f"{_purpose(node.source)}\n\n{time}".strip()
        case OperatorNode():
            return _about_operator(node)
        case SinkNode(stream=None):
            return f"{_purpose(node.sink)}\n\nTakes rows that came too late for their window."
        case SinkNode():
            assert node.stream is not None
            return f"{_purpose(node.sink)}\n\nTakes {_way(node.stream)}."
        case _:
            assert_never(node)


def _about_operator(node: OperatorNode) -> str:
    if isinstance(node.operator, Operator):
        tables = "".join(f"\n* {_table(table)}" for table in node.operator.tables())
        state = f"State:\n{tables}" if tables else "It keeps no state."
        return f"{_purpose(node.operator)}\n\n{_inputs(node)}\n\n{state}"
    window = node.operator
    columns = ", ".join(f"`{name}` = {of.kind}({of.column or ''})" for name, of in window.aggregates)
    keys = ", ".join(f"`{key}`" for key in window.keys)
    size = _words(window.size)
    return f"{columns}, by {keys}, in windows of {size} of `{window.event_time.column}`.\n\n{_inputs(node)}"


def _inputs(node: OperatorNode) -> str:
    ways = (
        _way(inlet.stream) + (f", by {', '.join(f'`{key}`' for key in inlet.keys)}" if inlet.keys else "")
        for inlet in node.inlets
    )
    return f"Takes {'; and '.join(ways)}."


def _way(stream: Expression) -> str:
    """How rows come: from where, through which steps."""
    match stream:
        case SourceNode() | OperatorNode():
            return f"`{stream.name}`"
        case Stepped(parent, step):
            return f"{_way(parent)} {_step(step)}"
        case Union(parents):
            return f"({' and '.join(map(_way, parents))})"
        case _:
            assert_never(stream)


def _step(step: Step) -> str:
    match step:
        case Where(condition):
            return f"where `{condition}`"
        case Select(expressions):
            return f"select `{', '.join(expressions)}`"
        case WithColumns(columns):
            return f"with `{', '.join(f'{name} = {expression}' for name, expression in columns)}`"
        case Sql(query):
            return f"by `{' '.join(query.split())}`"
        case MapBatches(function):
            return f"through `{getattr(function, '__name__', type(function).__name__)}`"
        case _:
            assert_never(step)


def _table(table: TableSpec) -> str:
    match table:
        case TimeTable(name, schema, time, retention):
            return f"`{name}`, rows by time `{time}`, kept for {retention}: {', '.join(schema.names)}"
        case KeyedTable(name, schema, key):
            return f"`{name}`, one row for each {', '.join(key)}: {', '.join(schema.names)}"
        case GlobalTable(name, schema, key):
            return (
                f"`{name}`, seen whole by every subtask, one row for each {', '.join(key)}: {', '.join(schema.names)}"
            )
        case _:
            assert_never(table)


def _fields(node: Node) -> Fields | None:
    """The columns of what an asset holds: a source's and a sink's rows, an operator's state."""
    match node:
        case SourceNode():
            return None if node.source.schema is None else _columns(node.source.schema)
        case SinkNode():
            return node.fields
        case OperatorNode():
            return _state_fields(node.operator.tables()) if isinstance(node.operator, Operator) else node.fields
        case _:
            assert_never(node)


def _state_fields(tables: Sequence[TableSpec]) -> Fields:
    prefixes = [f"{table.name}." if len(tables) > 1 else "" for table in tables]
    return {
        f"{prefix}{name}": kind
        for prefix, table in zip(prefixes, tables, strict=True)
        for name, kind in _columns(table.schema).items()
    }


def _columns(schema: pa.Schema) -> Mapping[str, pa.DataType]:
    return dict(zip(schema.names, schema.types, strict=True))


def _kinds(node: Node) -> set[str]:
    match node:
        case SourceNode():
            kinds = {node.source.kind}
        case OperatorNode():
            kinds = {"pyspark"}
        case SinkNode():
            kinds = {node.sink.kind}
        case _:
            assert_never(node)
    return kinds - {""}


def _url(node: Node) -> str | None:
    match node:
        case SourceNode():
            return node.source.url
        case SinkNode():
            return node.sink.url
        case OperatorNode():
            return None
        case _:
            assert_never(node)


def _origins(node: Node) -> Iterator[str]:
    match node:
        case SourceNode():
            return
        case OperatorNode():
            for inlet in node.inlets:
                yield from _names(inlet.stream)
        case SinkNode():
            if node.stream is not None:
                yield from _names(node.stream)
        case _:
            assert_never(node)


def _names(stream: Expression) -> Iterator[str]:
    match stream:
        case SourceNode() | OperatorNode():
            yield stream.name
        case Stepped(parent):
            yield from _names(parent)
        case Union(parents):
            for parent in parents:
                yield from _names(parent)
        case _:
            assert_never(stream)


def _purpose(of: object) -> str:
    """The first paragraph of what a class says of itself."""
    own = type(of).__doc__ or type(of).__name__
    return " ".join(own.strip().split("\n\n")[0].split())


def _words(micros: int) -> str:
    return pendulum.duration(microseconds=micros).in_words() or "no time"
