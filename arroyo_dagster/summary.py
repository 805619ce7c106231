"""An epoch in a handful of numbers, for a table in a terminal or a plot. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from arroyo_dagster.log import names
from arroyo_dagster.model import Manifest


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
    own = f"{names.attempt(manifest.epoch, manifest.attempt)}/"
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
        read_ms=_milliseconds(_slowest(manifest, "read")),
        restore_ms=_milliseconds(_slowest(manifest, "restore")),
        process_ms=_milliseconds(_slowest(manifest, "process")),
        align_ms=_milliseconds(_slowest(manifest, "align")),
        checkpoint_ms=_milliseconds(_slowest(manifest, "handle_checkpoint")),
        persist_ms=_milliseconds(_slowest(manifest, "persist")),
        emit_ms=_milliseconds(_slowest(manifest, "emit")),
        publish_ms=None if publish_micros is None else _milliseconds(publish_micros),
    )


def _slowest(manifest: Manifest, step: str) -> int:
    """The longest span of a step in each stage, summed up, in microseconds."""
    longest: dict[str, int] = {}
    for span in manifest.spans:
        if span.step == step:
            longest[span.stage] = max(span.micros, longest.get(span.stage, 0))
    return sum(longest.values())


def _milliseconds(micros: int) -> int:
    return (micros + 500) // 1000
