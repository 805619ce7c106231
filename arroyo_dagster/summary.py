"""An epoch in a handful of numbers, for a table in a terminal or a plot. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from arroyo_dagster.log import names
from arroyo_dagster.model import Manifest, Span


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """What an epoch read, wrote and kept, and how long its steps took.

    `rows_in` were read from sources and `rows_out` are for sinks. State is all that the epoch names, the delta what
    it has written itself. Of each step, the time is that of the slowest subtask, summed over the stages.
    `publish_ms` is None when nobody has measured it: a manifest is written before its output is published.
    """

    epoch: int
    attempt: int
    parent: int
    rows_in: int
    rows_out: int
    late_rows: int
    state_rows: int
    state_bytes: int
    delta_rows: int
    delta_bytes: int
    files: int
    delta_files: int
    read_ms: int
    restore_ms: int
    process_ms: int
    align_ms: int
    checkpoint_ms: int
    persist_ms: int
    emit_ms: int
    publish_ms: int | None


def summarize(manifest: Manifest, publish_micros: int | None = None) -> EpochSummary:
    """Add up what a manifest says. A file that several tables name counts once."""
    files = {file.path: file for file in manifest.files}.values()
    own = f"{names.epoch(manifest.epoch)}/"  # of an earlier attempt perhaps, whose stages did not have to run again
    delta = [file for file in files if file.path.startswith(own)]
    return EpochSummary(
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        parent=manifest.parent,
        rows_in=sum(source.rows for source in manifest.sources),
        rows_out=sum(file.rows for output in manifest.staged for file in output.files),
        late_rows=sum(operator.late_rows for operator in manifest.operators),
        state_rows=sum(file.rows for file in files),
        state_bytes=sum(file.bytes for file in files),
        delta_rows=sum(file.rows for file in delta),
        delta_bytes=sum(file.bytes for file in delta),
        files=len(files),
        delta_files=len(delta),
        read_ms=slowest_ms(manifest.spans, "read"),
        restore_ms=slowest_ms(manifest.spans, "restore"),
        process_ms=slowest_ms(manifest.spans, "process"),
        align_ms=slowest_ms(manifest.spans, "align"),
        checkpoint_ms=slowest_ms(manifest.spans, "handle_checkpoint"),
        persist_ms=slowest_ms(manifest.spans, "persist"),
        emit_ms=slowest_ms(manifest.spans, "emit"),
        publish_ms=None if publish_micros is None else _milliseconds(publish_micros),
    )


def slowest_ms(spans: Iterable[Span], step: str) -> int:
    """The longest span of a step in each stage, summed up, in milliseconds."""
    longest: dict[str, int] = {}
    for span in spans:
        if span.step == step:
            longest[span.stage] = max(span.micros, longest.get(span.stage, 0))
    return _milliseconds(sum(longest.values()))


def _milliseconds(micros: int) -> int:
    return (micros + 500) // 1000
