"""Put an attempt's manifest together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arroyo_dagster.model import Manifest, Plan, SourceRange, SourceRecord
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport


def compose(attempt: Attempt, parent: Manifest | None, reports: Sequence[StageReport]) -> Manifest:
    """Make the record of an attempt from what its stages report.

    A source or operator that was taken out of the pipeline keeps its offsets and its state, for the day that it
    is put back: what nobody has read today is not over.
    """
    sources: dict[str, SourceRecord] = {}
    for record in (record for report in reports for record in report.sources):
        known = sources.get(record.source)
        sources[record.source] = record.joined(known) if known else record
    plan = {
        name: span if name in sources else SourceRange(span.start, span.start)
        for name, span in attempt.plan.sources.items()
    }
    operators = {report.operator.operator: report.operator for report in reports if report.operator}
    tables = [table for report in reports for table in report.tables]
    if parent is not None:
        sources = {record.source: replace(record, rows=0, quarantined=()) for record in parent.sources} | sources
        tables += [table for table in parent.tables if table.operator not in operators]
        operators = {
            record.operator: replace(record, rows_in=0, rows_out=0, late_rows=0, skipped=(), metrics={}, subtasks=())
            for record in parent.operators
        } | operators
    return Manifest(
        attempt.barrier,
        attempt.number,
        attempt.parent,
        Plan(plan),
        tuple(tables),
        tuple(output for report in reports for output in report.staged),
        tuple(sources.values()),
        tuple(operators.values()),
        tuple(span for report in reports for span in report.spans),
    )
