"""Run one stage as one Spark job. Only the DataFrame API is used, so any session will do, Spark Connect's included."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from arroyo_dagster.log.codec import decode
from arroyo_dagster.spark.channels import MESSAGE_ORDER, MESSAGES
from arroyo_dagster.spark.code import ship_code
from arroyo_dagster.spark.failures import from_tasks
from arroyo_dagster.spark.gather import report_on_subtasks, report_on_writers
from arroyo_dagster.spark.plans import StageContext, plan_legs, plan_stage
from arroyo_dagster.spark.reports import StageReport, SubtaskReport, WriterReport
from arroyo_dagster.spark.spec import StageTask
from arroyo_dagster.spark.steps import SparkRows, partition_ids, take_steps
from arroyo_dagster.spark.subtask import run_subtask
from arroyo_dagster.spark.upstream import REPORT, read_and_send, send

R = TypeVar("R")

# As text, Spark would have to parse them for every job.
_MESSAGES = from_arrow_schema(MESSAGES)
_REPORTS = from_arrow_schema(REPORT)


def run_stage(
    session: SparkSession,
    context: StageContext,
    disturb: Callable[[DataFrame], DataFrame] = lambda messages: messages,
) -> StageReport:
    """Run a stage. Whatever does not fit together is said before anything is read.

    `disturb` changes the messages on their way; it is there for tests of what happens then.
    """
    ship_code(session)
    rows = [take_steps(session, plan) for plan in plan_legs(context)]
    task = plan_stage(context, [of_leg.leg for of_leg in rows], [of_leg.schema for of_leg in rows])
    together = reduce(DataFrame.union, [_sent(session, task, of_leg) for of_leg in rows])
    with from_tasks(f"stage {task.stage!r}"):
        if task.operator is None:
            return report_on_writers(task, _reports(WriterReport, together))
        messages = disturb(together).repartitionById(task.parallelism, "subtask")
        aligned = messages.sortWithinPartitions(*MESSAGE_ORDER).mapInArrow(run_subtask(task), _REPORTS)
        return report_on_subtasks(task, _reports(SubtaskReport, aligned))


def _sent(session: SparkSession, task: StageTask, rows: SparkRows) -> DataFrame:
    """The messages of one leg; of a stage without an operator, its reports."""
    columns = _REPORTS if task.operator is None else _MESSAGES
    if rows.frame is not None:
        assert rows.frame_schema is not None
        return rows.frame.mapInArrow(send(task, rows.leg, rows.frame_schema), columns)
    return partition_ids(session, rows.leg).mapInArrow(read_and_send(task, rows.leg), columns)


def _reports(kind: type[R], frame: DataFrame) -> list[R]:
    rows = sorted(frame.collect(), key=lambda row: row["subtask"])
    return [decode(kind, json.loads(row["report"]), "a task's report") for row in rows]
