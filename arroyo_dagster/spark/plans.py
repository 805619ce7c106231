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
from arroyo_dagster.dataflow.stream import check_time, fields_of
from arroyo_dagster.dataflow.watermarks import Clock
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import names
from arroyo_dagster.model import CheckpointBarrier, FileEntry, Manifest, ObjectPath, Plan
from arroyo_dagster.operators.partials import Partials, check_columns
from arroyo_dagster.operators.window import WindowOperator
from arroyo_dagster.spark.exchange import ExchangeSource
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.spark.spec import LegTask, SinkTask, StageTask, StateLocation, WindowTask
from arroyo_dagster.state.files import read_verified


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at an epoch: everything that its stages have in common. Small, and the same on every machine.

    `life` is unique to the pipeline's log. `parallelism` is the number of subtasks of keyed operators. A `replay` is
    of an epoch that exists: its number is that of the replay, and what it makes is compared, not committed.
    """

    barrier: CheckpointBarrier
    number: int
    parent: int
    plan: Plan
    life: str
    key_groups: int
    parallelism: int
    replay: bool = False

    @property
    def prefix(self) -> ObjectPath:
        """Where it may write."""
        return (names.replay if self.replay else names.attempt)(self.barrier.epoch, self.number)

    def __str__(self) -> str:
        return f"{'replay' if self.replay else 'attempt'} {self.number} of epoch {self.barrier.epoch}"


@dataclass(frozen=True, slots=True)
class StageContext:
    """A stage of an attempt, with all that it depends on: the parent epoch, and the stages before it."""

    graph: Graph
    stage: Stage
    attempt: Attempt
    parent: Manifest | None
    earlier: Mapping[str, StageReport]
    state: StateLocation


@dataclass(frozen=True, slots=True)
class LegPlan:
    """A leg, the schema of the rows that its readers give out, if it is known, and the steps that follow on Spark."""

    task: LegTask
    schema: pa.Schema | None
    steps: tuple[Step, ...]


def plan_legs(context: StageContext) -> list[LegPlan]:
    """Work out what each leg of a stage has to read, in which partitions."""
    return [_plan_leg(context, leg, number) for number, leg in enumerate(context.stage.legs)]


def plan_stage(context: StageContext, legs: Sequence[LegTask], schemas: Sequence[pa.Schema | None]) -> StageTask:
    """Work out the rest of a stage, once the `schemas` of the rows that come by each leg are known, if any come."""
    stage, attempt, parent = context.stage, context.attempt, context.parent
    _check_keys(legs, schemas)
    rows = next((schema for schema in schemas if schema is not None), None)
    tables: dict[str, tuple[FileEntry, ...]] = {}
    watermark = None
    if parent is not None and stage.operator is not None:
        tables = {files.table: files.files for files in parent.tables if files.operator == stage.name}
        records = {record.operator: record for record in parent.operators}
        watermark = records[stage.name].watermark if stage.name in records else None
    operator, window = None, None
    if stage.operator is not None:
        operator, window = _operator(stage.operator, rows, tables, context)
    return StageTask(
        stage.name,
        context.state,
        attempt.barrier,
        attempt.number,
        attempt.prefix,
        attempt.parallelism if stage.operator and stage.operator.keyed else 1,
        attempt.key_groups,
        tuple(legs),
        operator,
        window,
        watermark,
        tables,
        tuple(_sink(context, outlet.sink, outlet.steps) for outlet in stage.outlets),
        stage.exchanged,
    )


def _check_keys(legs: Sequence[LegTask], schemas: Sequence[pa.Schema | None]) -> None:
    """See that rows with equal keys will meet, by whichever leg they come."""
    first: tuple[LegTask, list[pa.DataType]] | None = None
    for leg, schema in zip(legs, schemas, strict=True):
        if schema is None or not leg.keys:
            continue
        check_columns(schema, leg.keys)
        kinds = [schema.field(key).type for key in leg.keys]
        if first is None:
            first = (leg, kinds)
        elif kinds != first[1]:
            raise ConfigurationError(
                f"{leg.stage}: the key is {', '.join(map(str, first[1]))} in the rows of {first[0].origin}, but "
                f"{', '.join(map(str, kinds))} in those of {leg.origin}, so that equal ones would not meet: cast one"
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


def _plan_leg(context: StageContext, leg: Leg, number: int) -> LegPlan:
    """Cut what a leg has to read into partitions, and its steps into those before, on and after Spark."""
    stage, attempt = context.stage, context.attempt
    source, splits, schema, clock = _origin(context, leg)
    node = context.graph.source(leg.origin) if leg.from_source else None
    first = _leading_functions(leg.steps)
    last = () if len(first) == len(leg.steps) else tuple(reversed(_leading_functions(leg.steps[::-1])))
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
        node.event_time if node else None,
        clock,
        stage.operator.inlets[leg.input].keys if stage.operator else (),
        first,
        last,
    )
    if schema is not None and leg.columns is not None:
        schema = pa.schema([schema.field(name) for name in leg.columns if name in schema.names])
    for step in first:
        schema = step.schema or schema
    return LegPlan(task, schema, leg.steps[len(first) : len(leg.steps) - len(last)])


def _origin(context: StageContext, leg: Leg) -> tuple[Source, Sequence[Split], pa.Schema | None, Clock | None]:
    """What a leg reads: from whom, which parts, with which columns, and how far its event time had come."""
    now = context.attempt.barrier.timestamp
    if not leg.from_source:
        exchange = context.earlier[leg.origin].exchange
        assert exchange is not None
        rows = ExchangeSource(exchange, context.state.open)
        clock = Clock(exchange.watermark, now, asleep=exchange.idle) if exchange.timed else None
        return rows, rows.splits(None, None), rows.schema, clock
    node = context.graph.source(leg.origin)
    assert node is not None
    # A source that came after the plan was made is read from the next epoch on.
    span = context.attempt.plan.sources.get(leg.origin)
    splits = node.source.splits(span.start, span.end) if span else ()
    schema = node.source.schema_at(span.end if span else None)
    if node.event_time is None:
        return node.source, splits, schema, None
    if schema is not None:
        check_time(fields_of(schema), node.event_time.column, f"source {leg.origin!r}")
    records = {record.source: record for record in (context.parent.sources if context.parent else ())}
    record = records.get(leg.origin)
    watermark, active_at = (record.watermark, record.active_at) if record else (None, now)
    idle_after = None if span and span.backlog else node.idle_after
    return node.source, splits, schema, Clock(watermark, active_at, node.delay, idle_after)


def _sink(context: StageContext, name: str, steps: tuple[MapBatches, ...] = ()) -> SinkTask:
    identity = SinkIdentity(context.state.pipeline, name, context.attempt.life)
    return SinkTask(context.graph.sink(name).sink, identity, steps)


def _leading_functions(steps: Sequence[Step]) -> tuple[MapBatches, ...]:
    functions: list[MapBatches] = []
    for step in steps:
        if not isinstance(step, MapBatches):
            break
        functions.append(step)
    return tuple(functions)


def _operator(
    node: OperatorNode, rows: pa.Schema | None, tables: Mapping[str, tuple[FileEntry, ...]], context: StageContext
) -> tuple[Operator, WindowTask | None]:
    if not isinstance(node.operator, WindowAggregate):
        return node.operator, None
    spec = node.operator
    if rows is not None:
        partials = Partials.over(spec, rows)
    elif files := tables.get("windows"):
        # No rows came, so their schema is not known; but stored windows may close.
        data = read_verified(context.state.open(), files[0])
        partials = Partials.stored_as(spec, pq.read_schema(pa.BufferReader(data)).remove_metadata())
    else:
        return Operator(), None
    late = _sink(context, node.late_to) if node.late_to else None
    return WindowOperator(spec, partials), WindowTask(spec, partials, late)
