"""The stateless steps that Spark takes itself, between those who read rows and those who send them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import assert_never

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from arroyo_dagster.dataflow.graph import MapBatches, Select, Sql, Step, Where, WithColumns
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.spark.plans import LegPlan
from arroyo_dagster.spark.spec import LegTask
from arroyo_dagster.spark.upstream import READER, apply_functions, read

_BROADCAST = "BroadcastExchange"
_NODE = re.compile(r"[A-Za-z]\w*")
# What a line of a physical plan begins with, when it is about rows that have to come together.
_TOGETHER = re.compile(
    r"^[\W\d]*(Exchange|HashAggregate|ObjectHashAggregate|SortAggregate|Sort|Window|WindowGroupLimit|SortMergeJoin|"
    r"ShuffledHashJoin|CartesianProduct|GlobalLimit|LocalLimit|CollectLimit|TakeOrderedAndProject)\b",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class SparkRows:
    """A leg after Spark's steps.

    `frame` and its schema are None when Spark has none to take; `schema` is that of the rows that come to the stage,
    None when it is not known.
    """

    leg: LegTask
    frame: DataFrame | None
    frame_schema: pa.Schema | None
    schema: pa.Schema | None


def partition_ids(session: SparkSession, leg: LegTask) -> DataFrame:
    """One row for each partition of a leg, with its number; a leg with nothing to read has one that sends barriers."""
    count = max(1, len(leg.partitions))
    return session.range(0, count, 1, count)


def take_steps(session: SparkSession, plan: LegPlan) -> SparkRows:
    """Put Spark's steps behind the readers of a leg. A leg with nothing to read has no need of them."""
    leg, schema = plan.task, plan.schema
    if not plan.steps or not leg.partitions:
        return SparkRows(leg, None, None, schema if not plan.steps else None)
    if schema is None:
        raise ConfigurationError(
            f"{leg.stage}: the columns of {leg.origin} are not known, so that Spark cannot work on them: "
            "give the function or operator before that step a schema="
        )
    schema = _for_spark(schema, leg)
    frame = partition_ids(session, leg).mapInArrow(read(leg, schema), from_arrow_schema(schema))
    for place, step in enumerate(plan.steps):
        with _explained(leg, step):
            frame = _step(session, f"arroyo_dagster_{leg.stage}_{leg.number}_{place}", leg, frame, step)
            schema = to_arrow_schema(frame.schema, timezone="UTC")
    _check_narrow(frame, leg)
    frame_schema = schema
    for function in leg.last_steps:
        schema = function.schema or schema
    return SparkRows(leg, frame, frame_schema, schema)


def _step(session: SparkSession, view: str, leg: LegTask, frame: DataFrame, step: Step) -> DataFrame:
    match step:
        case Where(condition):
            return frame.filter(condition)
        case Select(expressions):
            return frame.selectExpr(*expressions)
        case WithColumns(columns):
            return frame.withColumns({name: F.expr(expression) for name, expression in columns})
        case Sql(query):
            frame.createOrReplaceTempView(view)
            # The name is bound inside the query: with Spark Connect, a view is looked up only when the query runs.
            return session.sql(f"WITH rows AS (SELECT * FROM {view}) SELECT * FROM ({query})")  # noqa: S608
        case MapBatches(schema=schema):
            rows = _for_spark(schema or to_arrow_schema(frame.schema, timezone="UTC"), leg)
            return frame.mapInArrow(apply_functions((step,), rows, leg.stage), from_arrow_schema(rows))
        case _:
            assert_never(step)


def _check_narrow(frame: DataFrame, leg: LegTask) -> None:
    """Refuse steps that see rows together: what they give out would depend on where epochs begin and end."""
    text = io.StringIO()
    with redirect_stdout(text):
        frame.explain()
    plan = text.getvalue()
    way = f"{leg.stage}: a query on the way from {leg.origin}"
    if _TOGETHER.search(plan) or plan.count(READER) > 1:
        raise ConfigurationError(
            f"{way} has to see rows together (GROUP BY, DISTINCT, ORDER BY, LIMIT, or a join or union of the rows with "
            "themselves), and an epoch is no meaningful unit for that: use aggregate, process or union"
        )
    if READER not in plan:
        raise ConfigurationError(f"{way} lets no row through, whatever it reads: mend its condition, or take it out")
    if _BROADCAST in _above(plan, READER):
        raise ConfigurationError(
            f"{way} joins in a way that would send all rows everywhere: "
            "hint at the other table, as in SELECT /*+ BROADCAST(other) */"
        )


def _above(plan: str, node: str) -> set[str]:
    """The names of the nodes above one, in the tree of a physical plan."""
    above, limit = set[str](), None
    for line in reversed(plan.splitlines()):
        name = _NODE.search(line)
        if name is None or (limit is None and node not in line):
            continue
        if limit is None or name.start() < limit:
            limit = name.start()
            above.add(name[0])
    return above


def _for_spark(schema: pa.Schema, leg: LegTask) -> pa.Schema:
    """The schema as Spark would have it: times in microseconds, and no types that it lacks."""
    fields = []
    for field in schema:
        try:
            [column] = to_arrow_schema(from_arrow_schema(pa.schema([field])), timezone="UTC")
        except (PySparkException, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{leg.stage}: Spark has no type for the column {field.name!r} of {leg.origin}, which is {field.type}: "
                "turn it into another with map_batches before Spark's steps"
            ) from error
        fields.append(column)
    return pa.schema(fields)


@contextmanager
def _explained(leg: LegTask, step: Step) -> Iterator[None]:
    try:
        yield
    except (AnalysisException, ParseException) as error:
        cause = " ".join(str(error).split("\n\n", 1)[0].split("\n"))
        raise ConfigurationError(
            f"{leg.stage}: Spark cannot do {_words(step)} on the rows of {leg.origin}: {cause}"
        ) from error


def _words(step: Step) -> str:
    match step:
        case Where(condition):
            return f"where({condition!r})"
        case Select(expressions):
            return f"select({', '.join(map(repr, expressions))})"
        case WithColumns(columns):
            return f"with_columns({', '.join(f'{name}={expression!r}' for name, expression in columns)})"
        case Sql(query):
            return f"sql({query!r})"
        case MapBatches(function):
            return f"map_batches({getattr(function, '__name__', function)})"
        case _:
            assert_never(step)
