"""Put together what the tasks of a stage report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from arroyo_dagster.dataflow.watermarks import Clock
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.model import FileEntry, OperatorRecord, SourceRecord, Span, StagedOutput, SubtaskRecord
from arroyo_dagster.spark.channels import SenderReport
from arroyo_dagster.spark.reports import Exchange, StageReport, SubtaskReport, WriterReport
from arroyo_dagster.spark.spec import StageTask
from arroyo_dagster.state.manager import gather


def report_on_subtasks(task: StageTask, reports: Sequence[SubtaskReport]) -> StageReport:
    """What a stage with an operator has done, from the reports of all subtasks in order."""
    _check_complete(task, [report.subtask for report in reports], range(task.parallelism))
    senders = [sender for report in reports for sender in report.senders]
    _check_agreement(task, reports, senders)
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
        tuple(SubtaskRecord(report.rows_in, report.rows_out) for report in reports),
    )
    exchange = Exchange(
        tuple(file for report in reports for file in report.exchange.files),
        next((report.exchange.schema for report in reports if report.exchange.schema), None),
        min(marks, default=None),
        timed=reports[0].exchange.timed,
        idle=reports[0].exchange.idle,
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


def report_on_writers(task: StageTask, reports: Sequence[WriterReport]) -> StageReport:
    """What a stage without an operator has done."""
    senders = [report.sender for report in reports]
    expected = [(leg.number, partition) for leg in task.legs for partition in range(max(1, len(leg.partitions)))]
    _check_complete(task, sorted((sender.leg, sender.sender) for sender in senders), expected)
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


def _check_complete(task: StageTask, reported: Sequence[object], expected: Iterable[object]) -> None:
    """Every task has reported, and none twice."""
    if reported != list(expected):
        raise AttemptError(f"stage {task.stage!r}: its tasks have reported as {reported}, not as {list(expected)}")


def _check_agreement(task: StageTask, reports: Sequence[SubtaskReport], senders: Sequence[SenderReport]) -> None:
    """All subtasks have got what the same try of each sender has sent, and all of it."""
    received, sent = sum(report.rows_in for report in reports), sum(sender.rows_sent for sender in senders)
    if len({report.outputs for report in reports}) > 1 or received != sent:
        raise AttemptError(
            f"stage {task.stage!r}: a task before the shuffle was tried again and gave out other rows than before "
            f"({sent} rows were sent, {received} have come); see that sources and functions do the same every time"
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
        record = SourceRecord(leg.origin, rows, clock.watermark, clock.active_at, quarantined)
        records[leg.origin] = record.joined(records[leg.origin]) if leg.origin in records else record
    return tuple(records.values())


def _by_sink(outputs: Iterable[StagedOutput]) -> tuple[StagedOutput, ...]:
    files: dict[str, list[FileEntry]] = {}
    for output in outputs:
        files.setdefault(output.sink, []).extend(output.files)
    return tuple(StagedOutput(sink, tuple(of_sink)) for sink, of_sink in files.items())


def _reading(task: StageTask, senders: Iterable[SenderReport]) -> Iterable[Span]:
    return (Span(task.stage, sender.sender, "read", sender.start, sender.micros) for sender in senders)
