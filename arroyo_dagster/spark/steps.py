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
from pyspark.sql.types import StructType

from arroyo_dagster.dataflow.graph import MapBatches, Select, Sql, Step, Where, WithColumns
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.spark.plans import LegPlan
from arroyo_dagster.spark.spec import LegTask
from arroyo_dagster.spark.upstream import apply_functions, read

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
    frame = partition_ids(session, leg).mapInArrow(read(leg, schema), _spark_schema(schema, leg))
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
            return session.sql(f"WITH stream AS (SELECT * FROM {view}) SELECT * FROM ({query})")  # noqa: S608
        case MapBatches(schema=schema):
            rows = schema or to_arrow_schema(frame.schema, timezone="UTC")
            return frame.mapInArrow(apply_functions((step,), rows, leg.stage), _spark_schema(rows, leg))
        case _:
            assert_never(step)


def _check_narrow(frame: DataFrame, leg: LegTask) -> None:
    """Refuse steps that see rows together: what they give out would depend on where epochs begin and end."""
    plan = io.StringIO()
    with redirect_stdout(plan):
        frame.explain()
    if _TOGETHER.search(plan.getvalue()):
        raise ConfigurationError(
            f"{leg.stage}: a query on the way from {leg.origin} has to see rows together (GROUP BY, DISTINCT, ORDER "
            "BY, LIMIT or a join that shuffles), and an epoch is no meaningful unit for that: use aggregate or process"
        )


def _spark_schema(schema: pa.Schema, leg: LegTask) -> StructType:
    try:
        return from_arrow_schema(schema)
    except PySparkException as error:
        raise ConfigurationError(
            f"{leg.stage}: Spark has no type for a column of {leg.origin}: {error.getMessage() or error}"
        ) from error


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
