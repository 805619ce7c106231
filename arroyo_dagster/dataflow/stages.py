"""Cut a dataflow into stages: everything between two shuffles, which runs as one Spark job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from arroyo_dagster.dataflow.graph import (
    Expression,
    Graph,
    MapBatches,
    OperatorNode,
    SourceNode,
    Step,
    Stepped,
    Union,
    WindowAggregate,
)


@dataclass(frozen=True, slots=True)
class Leg:
    """One way for rows into a stage: from a source, or from what an earlier stage left, through stateless steps.

    `input` is the operator's input that it leads to, and `columns` are all that is needed of the origin (None: all).
    """

    input: int
    origin: str
    from_source: bool
    steps: tuple[Step, ...]
    columns: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Outlet:
    """A sink that takes an operator's rows where they arise, perhaps after some functions on batches."""

    sink: str
    steps: tuple[MapBatches, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """One Spark job: legs, then a shuffle and an operator, then sinks; or legs that lead to one sink at once.

    `exchanged` says that later stages read the operator's rows.
    """

    name: str
    legs: tuple[Leg, ...]
    operator: OperatorNode | None
    outlets: tuple[Outlet, ...]
    exchanged: bool


def cut(graph: Graph) -> tuple[Stage, ...]:
    """Cut a graph into stages, each behind those that it reads from."""
    read_later: set[str] = set()
    outlets: dict[str, list[Outlet]] = {}
    sink_stages: list[Stage] = []
    for sink in graph.sinks:
        if sink.stream is None:
            continue
        legs = tuple(_legs(sink.stream, 0, None))
        steps = tuple(step for step in legs[0].steps if isinstance(step, MapBatches))
        if len(legs) == 1 and not legs[0].from_source and steps == legs[0].steps:
            outlets.setdefault(legs[0].origin, []).append(Outlet(sink.name, steps))
        else:
            sink_stages.append(Stage(sink.name, legs, None, (Outlet(sink.name, ()),), exchanged=False))
    legs_of = {
        node.name: tuple(leg for place, inlet in enumerate(node.inlets) for leg in _legs(inlet.stream, place, node))
        for node in graph.operators
    }
    for legs in (*legs_of.values(), *(stage.legs for stage in sink_stages)):
        read_later.update(leg.origin for leg in legs if not leg.from_source)
    operator_stages = (
        Stage(node.name, legs_of[node.name], node, tuple(outlets.get(node.name, ())), node.name in read_later)
        for node in graph.operators
    )
    return (*operator_stages, *sink_stages)


def _legs(stream: Expression, place: int, reader: OperatorNode | None, steps: tuple[Step, ...] = ()) -> Iterator[Leg]:
    match stream:
        case SourceNode(name):
            yield Leg(place, name, True, steps, _needed(reader, steps, stream))
        case OperatorNode(name):
            yield Leg(place, name, False, steps, _needed(reader, steps, None))
        case Stepped(parent, step):
            yield from _legs(parent, place, reader, (step, *steps))
        case Union(parents):
            for parent in parents:
                yield from _legs(parent, place, reader, steps)
        case _:
            assert_never(stream)


def _needed(reader: OperatorNode | None, steps: tuple[Step, ...], source: SourceNode | None) -> tuple[str, ...] | None:
    """The columns that a window's aggregates are made of, where nothing else looks at the rows."""
    if reader is None or steps or reader.late_to or not isinstance(reader.operator, WindowAggregate):
        return None
    spec = reader.operator
    columns = [*spec.keys, spec.event_time.column, *(agg.column for _, agg in spec.aggregates if agg.column)]
    if source and source.event_time:
        columns.append(source.event_time.column)
    return tuple(dict.fromkeys(columns))
