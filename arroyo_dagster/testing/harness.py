"""Run pipelines without Spark, for tests that take many epochs: the code of the tasks is the same, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark import cloudpickle

from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log.codec import decode
from arroyo_dagster.spark.channels import MESSAGE_ORDER, MESSAGES
from arroyo_dagster.spark.gather import report_on_subtasks, report_on_writers
from arroyo_dagster.spark.plans import StageContext, plan_legs, plan_stage
from arroyo_dagster.spark.reports import StageReport, WriterReport
from arroyo_dagster.spark.spec import StageTask
from arroyo_dagster.spark.subtask import Subtask
from arroyo_dagster.spark.upstream import read_and_send


class InProcessEngine(Engine):
    """An engine that moves messages itself. Steps that Spark takes (`where`, `select`, ...) are beyond it.

    `disturb` changes the messages on their way, for tests of what happens then.
    """

    disturb: Callable[[pa.Table], pa.Table] = staticmethod(lambda messages: messages)

    def _execute(self, context: StageContext) -> StageReport:
        plans = plan_legs(context)
        if any(plan.steps for plan in plans):
            raise ConfigurationError(f"stage {context.stage.name!r} has steps in Spark SQL, which need a Spark session")
        task = plan_stage(context, [plan.task for plan in plans], [plan.schema for plan in plans])
        sent = list(_sent(task))
        if task.operator is None:
            texts = [text for batch in sent for text in batch.column("report").to_pylist()]
            return report_on_writers(task, [decode(WriterReport, json.loads(text), "a report") for text in texts])
        messages = self.disturb(pa.Table.from_batches(sent, MESSAGES))
        messages = messages.sort_by([(column, "ascending") for column in MESSAGE_ORDER])
        reports = []
        for index in range(task.parallelism):
            mine = messages.filter(pa.compute.equal(messages["subtask"], index))
            reports.append(Subtask(_as_sent(task), index).run(iter(mine.to_batches())))
        return report_on_subtasks(task, reports)


def _sent(task: StageTask) -> Iterator[pa.RecordBatch]:
    for leg in task.legs:
        for partition in range(max(1, len(leg.partitions))):
            numbers = pa.RecordBatch.from_pydict({"id": pa.array([partition], pa.int64())})
            yield from read_and_send(_as_sent(task), leg)(iter([numbers]))


def _as_sent(task: StageTask) -> StageTask:
    """The task as it comes out on the other side: every subtask has an operator of its own."""
    sent: StageTask = cloudpickle.loads(cloudpickle.dumps(task))  # type: ignore[no-untyped-call]
    return sent
