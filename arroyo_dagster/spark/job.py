"""Run one stage as one Spark job. Only the DataFrame API is used, so any session will do, Spark Connect's included."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TypeVar

from pyspark.sql import DataFrame, SparkSession

from arroyo_dagster.dataflow.graph import Graph
from arroyo_dagster.dataflow.stages import Stage
from arroyo_dagster.dataflow.watermarks import Clock
from arroyo_dagster.log.codec import decode
from arroyo_dagster.model import FileEntry, Manifest, OperatorRecord, SourceRecord, Span, StagedOutput
from arroyo_dagster.spark.channels import MESSAGE_COLUMNS, MESSAGE_ORDER, SenderReport
from arroyo_dagster.spark.code import ship_code
from arroyo_dagster.spark.failures import from_tasks
from arroyo_dagster.spark.plans import Attempt, plan_leg, plan_stage
from arroyo_dagster.spark.reports import Exchange, StageReport, SubtaskReport, WriterReport
from arroyo_dagster.spark.spec import StageTask, StateLocation
from arroyo_dagster.spark.steps import SparkRows, partition_ids, take_steps
from arroyo_dagster.spark.subtask import run_subtask
from arroyo_dagster.spark.upstream import REPORT_COLUMNS, read_and_send, send
from arroyo_dagster.state.manager import gather

R = TypeVar("R")


def run_stage(
    session: SparkSession,
    graph: Graph,
    stage: Stage,
    attempt: Attempt,
    parent: Manifest | None,
    earlier: Mapping[str, StageReport],
    state: StateLocation,
    disturb: Callable[[DataFrame], DataFrame] = lambda messages: messages,
) -> StageReport:
    """Run a stage of an attempt, on top of the parent epoch and of the stages before it.

    Whatever does not fit together is said before anything is read. `disturb` changes the messages on their way; it is
    there for tests of what happens then.
    """
    ship_code(session)
    plans = [
        plan_leg(graph, stage, leg, number, attempt, parent, earlier, state) for number, leg in enumerate(stage.legs)
    ]
    rows = [take_steps(session, plan) for plan in plans]
    schema = next((of_leg.schema for of_leg in rows if of_leg.schema is not None), None)
    task = plan_stage(graph, stage, [plan.task for plan in plans], schema, attempt, parent, state)
    sent = [_sent(session, task, of_leg) for of_leg in rows]
    together = reduce(DataFrame.union, sent)
    with from_tasks(f"stage {stage.name!r}"):
        if task.operator is None:
            written = _reports(WriterReport, together)
            return _report_on_writers(task, written)
        messages = disturb(together).repartitionById(task.parallelism, "subtask")
        aligned = messages.sortWithinPartitions(*MESSAGE_ORDER).mapInArrow(run_subtask(task), REPORT_COLUMNS)
        return _report_on_subtasks(task, _reports(SubtaskReport, aligned))


def _sent(session: SparkSession, task: StageTask, rows: SparkRows) -> DataFrame:
    """The messages of one leg; of a stage without an operator, its reports."""
    columns = REPORT_COLUMNS if task.operator is None else MESSAGE_COLUMNS
    if rows.frame is not None:
        assert rows.frame_schema is not None
        return rows.frame.mapInArrow(send(task, rows.leg, rows.frame_schema), columns)
    return partition_ids(session, rows.leg).mapInArrow(read_and_send(task, rows.leg), columns)


def _reports(kind: type[R], frame: DataFrame) -> list[R]:
    rows = sorted(frame.collect(), key=lambda row: row["subtask"])
    return [decode(kind, json.loads(row["report"]), "a task's report") for row in rows]


def _report_on_subtasks(task: StageTask, reports: Sequence[SubtaskReport]) -> StageReport:
    senders = [sender for report in reports for sender in report.senders]
    staged = [output for report in reports for output in report.staged]
    if task.window and task.window.late:
        late_to = task.window.late.identity.sink
        staged += [StagedOutput(late_to, sender.late_files) for sender in senders]
    marks = [report.watermark_out for report in reports if report.watermark_out is not None]
    metrics: Counter[str] = Counter()
    for report in reports:
        metrics.update(report.metrics)
    record = OperatorRecord(
        task.stage,
        task.parallelism,
        reports[0].watermark,
        sum(sender.rows_sent for sender in senders),
        sum(report.rows_out for report in reports),
        sum(sender.late_rows for sender in senders),
        tuple(report.subtask for report in reports if report.skipped),
        dict(metrics),
    )
    exchange = Exchange(
        tuple(file for report in reports for file in report.exchange.files),
        next((report.exchange.schema for report in reports if report.exchange.schema), None),
        min(marks, default=None),
    )
    return StageReport(
        task.stage,
        _source_records(task, senders),
        record,
        gather(task.stage, [report.tables for report in reports]),
        _by_sink(staged),
        exchange,
        (*_reading(task, senders), *(span for report in reports for span in report.spans)),
    )


def _report_on_writers(task: StageTask, reports: Sequence[WriterReport]) -> StageReport:
    senders = [report.sender for report in reports]
    sink = task.outlets[0].identity.sink
    return StageReport(
        task.stage,
        _source_records(task, senders),
        None,
        (),
        _by_sink(StagedOutput(sink, report.files) for report in reports),
        None,
        tuple(_reading(task, senders)),
    )


def _source_records(task: StageTask, senders: Sequence[SenderReport]) -> tuple[SourceRecord, ...]:
    records: dict[str, SourceRecord] = {}
    for leg in task.legs:
        if not leg.from_source:
            continue
        mine = [sender for sender in senders if sender.leg == leg.number]
        latest = max((sender.latest for sender in mine if sender.latest is not None), default=None)
        rows, now = sum(sender.rows_read for sender in mine), task.barrier.timestamp
        clock = leg.clock.advance(latest, rows, now) if leg.clock else Clock(None, now)
        quarantined = tuple(sorted({name for sender in mine for name in sender.quarantined}))
        records[leg.origin] = SourceRecord(leg.origin, rows, clock.watermark, clock.active_at, quarantined)
    return tuple(records.values())


def _by_sink(outputs: Iterable[StagedOutput]) -> tuple[StagedOutput, ...]:
    files: dict[str, list[FileEntry]] = {}
    for output in outputs:
        files.setdefault(output.sink, []).extend(output.files)
    return tuple(StagedOutput(sink, tuple(of_sink)) for sink, of_sink in files.items())


def _reading(task: StageTask, senders: Iterable[SenderReport]) -> Iterable[Span]:
    return (Span(task.stage, sender.sender, "read", sender.start, sender.micros) for sender in senders)
