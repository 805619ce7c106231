"""Work out what the tasks of a stage have to do, from the dataflow, the epoch's plan and the parent's manifest."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.dataflow.graph import Graph, MapBatches, OperatorNode, Step, WindowAggregate
from arroyo_dagster.dataflow.operator import Operator
from arroyo_dagster.dataflow.sink import SinkIdentity
from arroyo_dagster.dataflow.source import Source, Split
from arroyo_dagster.dataflow.stages import Leg, Stage
from arroyo_dagster.dataflow.watermarks import Clock
from arroyo_dagster.model import CheckpointBarrier, FileEntry, Manifest, Plan
from arroyo_dagster.operators.partials import Partials
from arroyo_dagster.operators.window import WindowOperator
from arroyo_dagster.spark.exchange import ExchangeSource
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.spark.spec import LegTask, SinkTask, StageTask, StateLocation, WindowTask
from arroyo_dagster.state.files import read_verified


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at an epoch: everything that its stages have in common. Small, and the same on every machine.

    `life` is unique to the pipeline's log. `parallelism` is the number of subtasks of keyed operators.
    """

    barrier: CheckpointBarrier
    number: int
    parent: int
    plan: Plan
    life: str
    key_groups: int
    parallelism: int


@dataclass(frozen=True, slots=True)
class LegPlan:
    """A leg, the schema of the rows that its readers give out, if it is known, and the steps that follow on Spark."""

    task: LegTask
    schema: pa.Schema | None
    steps: tuple[Step, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read."""
        return not self.task.partitions


def plan_leg(
    graph: Graph,
    stage: Stage,
    leg: Leg,
    number: int,
    attempt: Attempt,
    parent: Manifest | None,
    earlier: Mapping[str, StageReport],
    state: StateLocation,
) -> LegPlan:
    """Cut what a leg has to read into partitions, and its steps into those before, on and after Spark."""
    node = graph.source(leg.origin) if leg.from_source else None
    if node is not None:
        source: Source = node.source
        # A source that came after the plan was made is read from the next epoch on.
        span = attempt.plan.sources.get(leg.origin)
        schema = source.schema_at(span.end if span else None)
        splits = source.splits(span.start, span.end) if span else ()
        records = {record.source: record for record in (parent.sources if parent else ())}
        record = records.get(leg.origin)
        active_at = record.active_at if record else attempt.barrier.timestamp
        watermark = record.watermark if record else None
        clock = Clock(watermark, active_at, node.delay, node.idle_after) if node.event_time else None
        event_time = node.event_time
    else:
        exchange = earlier[leg.origin].exchange
        assert exchange is not None
        source = ExchangeSource(exchange, state.open)
        schema, splits, event_time = source.schema, source.splits(None, None), None
        clock = Clock(exchange.watermark, attempt.barrier.timestamp)
    steps = leg.steps
    first = _leading_functions(steps)
    last = () if len(first) == len(steps) else tuple(reversed(_leading_functions(steps[::-1])))
    task = LegTask(
        stage.name,
        secrets.token_hex(8),
        number,
        leg.input,
        leg.origin,
        leg.from_source,
        source,
        pack(splits, attempt.parallelism),
        leg.columns,
        event_time,
        clock,
        stage.operator.inlets[leg.input].keys if stage.operator else (),
        first,
        last,
    )
    if schema is not None and leg.columns is not None:
        schema = pa.schema([schema.field(name) for name in leg.columns if name in schema.names])
    for step in first:
        schema = step.schema or schema
    return LegPlan(task, schema, steps[len(first) : len(steps) - len(last)])


def plan_stage(
    graph: Graph,
    stage: Stage,
    legs: Sequence[LegTask],
    rows: pa.Schema | None,
    attempt: Attempt,
    parent: Manifest | None,
    state: StateLocation,
) -> StageTask:
    """Work out the rest of a stage, once the schema of the `rows` that come to it is known, if any come."""
    tables: dict[str, tuple[FileEntry, ...]] = {}
    watermark = None
    if parent is not None and stage.operator is not None:
        tables = {files.table: files.files for files in parent.tables if files.operator == stage.name}
        records = {record.operator: record for record in parent.operators}
        watermark = records[stage.name].watermark if stage.name in records else None

    def sink(name: str, steps: tuple[MapBatches, ...] = ()) -> SinkTask:
        return SinkTask(graph.sink(name).sink, SinkIdentity(state.pipeline, name, attempt.life), steps)

    operator, window = None, None
    if stage.operator is not None:
        operator, window = _operator(stage.operator, rows, tables, state)
        if window is not None and stage.operator.late_to:
            window = WindowTask(window.spec, window.partials, sink(stage.operator.late_to))
    return StageTask(
        stage.name,
        state,
        attempt.barrier,
        attempt.number,
        attempt.parallelism if stage.operator and stage.operator.keyed else 1,
        attempt.key_groups,
        tuple(legs),
        operator,
        window,
        watermark,
        tables,
        tuple(sink(outlet.sink, outlet.steps) for outlet in stage.outlets),
        stage.exchanged,
    )


def pack(splits: Sequence[Split], most: int) -> tuple[tuple[Split, ...], ...]:
    """Put splits into at most so many partitions of about the same weight, in their order within each."""
    count = min(len(splits), most)
    loads = [(0, number) for number in range(count)]
    partitions: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(splits)), key=lambda place: -splits[place].weight):
        load, number = heapq.heappop(loads)
        partitions[number].append(place)
        heapq.heappush(loads, (load + splits[place].weight, number))
    return tuple(tuple(splits[place] for place in sorted(places)) for places in sorted(partitions))


def _leading_functions(steps: Sequence[Step]) -> tuple[MapBatches, ...]:
    functions: list[MapBatches] = []
    for step in steps:
        if not isinstance(step, MapBatches):
            break
        functions.append(step)
    return tuple(functions)


def _operator(
    node: OperatorNode, rows: pa.Schema | None, tables: Mapping[str, tuple[FileEntry, ...]], state: StateLocation
) -> tuple[Operator, WindowTask | None]:
    if not isinstance(node.operator, WindowAggregate):
        return node.operator, None
    spec = node.operator
    if rows is not None:
        partials = Partials.over(spec, rows)
    elif files := tables.get("windows"):
        # No rows came, so their schema is not known; but stored windows may close.
        data = read_verified(state.open(), files[0])
        partials = Partials.stored_as(spec, pq.read_schema(pa.BufferReader(data)).remove_metadata())
    else:
        return Operator(), None
    return WindowOperator(spec, partials), WindowTask(spec, partials, None)
