"""Answers for people: tables that fit a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from pendulum import DateTime
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from arroyo_dagster.log import Mode, PipelineState
from arroyo_dagster.log.codec import encode
from arroyo_dagster.model import JsonValue, Manifest, from_micros
from arroyo_dagster.summary import EpochSummary, summarize

ABOUT_TIMES = "Times are those of each stage's slowest subtask; handle is handle_checkpoint."
_LONGEST_OFFSET = 60
_LONGEST_SIZE = len("999.9 kB")
_LENGTH_OF_MOMENT = len("2026-11-18 12:00:00")


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """What there is to know of a pipeline at a glance. `head` is 0 while there are no epochs."""

    name: str
    sources: tuple[str, ...]
    operators: tuple[str, ...]
    sinks: tuple[str, ...]
    state: str
    head: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Standing:
    """What a kept epoch is to its pipeline. One that is not live was superseded by a rewind."""

    live: bool
    head: bool
    sinks_pending: bool
    pin: str | None

    @classmethod
    def of(cls, state: PipelineState, epoch: int) -> Standing:
        """Ask the log."""
        return cls(epoch in state.live, epoch == state.head, epoch in state.needed_by_sinks, state.pins.get(epoch))

    def __str__(self) -> str:
        words = ["live" if self.live else "superseded"]
        words += ["head"] if self.head else []
        words += ["not published"] if self.sinks_pending else []
        words += [f"pinned {self.pin}".rstrip()] if self.pin is not None else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class EpochRow:
    """One kept epoch."""

    barrier: DateTime
    standing: Standing
    summary: EpochSummary

    def document(self) -> dict[str, object]:
        """All of it on one level."""
        return {"barrier": self.barrier, **asdict(self.standing), **asdict(self.summary)}


def pipelines(rows: Sequence[PipelineRow]) -> RenderableType:
    """The pipelines of a module."""
    table = _table("pipeline", "sources", "operators", "sinks", "head", "mode", "state", right={"head"})
    for row in rows:
        nodes = (", ".join(names) or "-" for names in (row.sources, row.operators, row.sinks))
        table.add_row(row.name, *nodes, str(row.head) if row.head else "-", str(row.mode), row.state)
    return table


def taken(summaries: Sequence[EpochSummary]) -> RenderableType:
    """The epochs that were just taken."""
    names = ("epoch", "rows in", "rows out", "late rows", "state rows", "state bytes")
    steps = ("read ms", "align ms", "handle ms", "persist ms", "publish ms")
    table = _table(*names, *steps, right={*names, *steps}, gap=1)  # it fits 80 columns
    for of in summaries:
        times = (of.read_ms, of.align_ms, of.checkpoint_ms, of.persist_ms, of.publish_ms)
        table.add_row(
            str(of.epoch),
            *(f"{rows:,}" for rows in (of.rows_in, of.rows_out, of.late_rows, of.state_rows)),
            decimal(of.state_bytes),
            *("-" if time is None else f"{time:,}" for time in times),
        )
    return table


def epochs(rows: Sequence[EpochRow]) -> RenderableType:
    """The epochs that are kept."""
    numbers = ("epoch", "parent", "attempt", "rows in", "rows out", "state bytes")
    table = _table("epoch", "barrier (UTC)", *numbers[1:], "standing", right=set(numbers), gap=1)
    for row in rows:
        of = row.summary
        table.add_row(
            str(of.epoch),
            _moment(row.barrier),
            _parent(of.parent),
            str(of.attempt),
            f"{of.rows_in:,}",
            f"{of.rows_out:,}",
            decimal(of.state_bytes),
            str(row.standing),
        )
    return table


def epoch(pipeline: str, manifest: Manifest, standing: Standing) -> Iterator[RenderableType]:
    """Everything about one epoch."""
    barrier = manifest.barrier
    yield Text(f"Epoch {manifest.epoch} of {pipeline}: {standing}", "bold")
    stop = ", then stop" if barrier.then_stop else ""
    yield (
        f"Barrier at {_moment(barrier.timestamp)} UTC{stop}; parent {_parent(manifest.parent)}, "
        f"attempt {manifest.attempt}, oldest epoch kept by the retention rule then {barrier.min_epoch or '-'}"
    )
    of = summarize(manifest)
    yield (
        f"{of.rows_in:,} rows in, {of.rows_out:,} out, {of.late_rows:,} late; state of {of.state_rows:,} rows in "
        f"{of.files:,} files, {decimal(of.state_bytes)}; new in this epoch: {of.delta_rows:,} rows in "
        f"{of.delta_files:,} files, {decimal(of.delta_bytes)}"
    )
    yield _sources(manifest)
    yield _operators(manifest)
    yield _state(manifest)
    yield _output(manifest)
    yield _spans(manifest)


def _sources(manifest: Manifest) -> RenderableType:
    table = _table("source", "from", "to", "rows", "watermark (UTC)", "left out", title="Sources", right={"rows"})
    records = {record.source: record for record in manifest.sources}
    for name, offsets in manifest.plan.sources.items():
        record = records.get(name)
        table.add_row(
            name,
            _offset(offsets.start),
            _offset(offsets.end) + (", and there was more" if offsets.backlog else ""),
            f"{record.rows:,}" if record else "-",
            _watermark(record.watermark if record else None),
            ", ".join(record.quarantined) if record and record.quarantined else "-",
        )
    return table


def _operators(manifest: Manifest) -> RenderableType:
    numbers = ("subtasks", "rows in", "rows out", "late rows")
    table = _table("operator", *numbers, "watermark (UTC)", "skipped", "metrics", title="Operators", right=set(numbers))
    for of in manifest.operators:
        table.add_row(
            of.operator,
            *(f"{number:,}" for number in (of.parallelism, of.rows_in, of.rows_out, of.late_rows)),
            _watermark(of.watermark),
            ", ".join(map(str, of.skipped)) or "-",
            ", ".join(f"{name} {value:,}" for name, value in of.metrics.items()) or "-",
        )
    return table


def _state(manifest: Manifest) -> RenderableType:
    table = _table("table", "rows", "bytes", "keys", "times (UTC)", "file", title="State", right={"rows", "bytes"})
    for of in manifest.tables:
        for file in of.files:
            table.add_row(
                f"{of.operator}.{of.table}",
                f"{file.rows:,}",
                decimal(file.bytes),
                "{}-{}".format(*file.key_groups) if file.key_groups else "-",
                f"{_watermark(file.times[0])}\n{_watermark(file.times[1])}" if file.times else "-",
                file.path,
            )
    return table


def _output(manifest: Manifest) -> RenderableType:
    table = _table("sink", "rows", "bytes", "file", title="Output", right={"rows", "bytes"})
    for output in manifest.staged:
        for file in output.files:
            table.add_row(output.sink, f"{file.rows:,}", decimal(file.bytes), file.path)
    return table


def _spans(manifest: Manifest) -> RenderableType:
    """Steps in the order in which they began, each with its fastest and its slowest subtask."""
    numbers = ("subtasks", "began at ms", "fastest ms", "slowest ms")
    table = _table("stage", "step", *numbers, title="Steps", right=set(numbers))
    first = min((span.start for span in manifest.spans), default=0)
    spans = sorted(manifest.spans, key=lambda span: (span.stage, span.step))
    groups = [list(group) for _, group in groupby(spans, key=lambda span: (span.stage, span.step))]
    for group in sorted(groups, key=lambda group: min(span.start for span in group)):
        micros = [span.micros for span in group]
        began = min(span.start for span in group) - first
        times = (f"{time / 1000:,.1f}" for time in (began, min(micros), max(micros)))
        table.add_row(group[0].stage, group[0].step, str(len(group)), *times)
    return table


def _table(*columns: str, right: set[str], title: str | None = None, gap: int = 2) -> Table:
    """A table in which numbers, the columns on the right, and times are never broken."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0))
    table.title, table.title_justify, table.title_style = title and f"\n{title}", "left", "bold"
    for column in columns:
        if column in right:
            width = _LONGEST_SIZE if "bytes" in column else None
            table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True, min_width=width)
        elif "(UTC)" in column:
            table.add_column(column, no_wrap=True, min_width=_LENGTH_OF_MOMENT)
        else:
            table.add_column(column, overflow="fold")
    return table


def _parent(epoch: int) -> str:
    return str(epoch) if epoch else "-"


def _moment(time: DateTime) -> str:
    return time.in_timezone("UTC").format("YYYY-MM-DD HH:mm:ss")


def _watermark(micros: int | None) -> str:
    return "-" if micros is None else _moment(from_micros(micros))


def _offset(offset: JsonValue) -> str:
    text = "-" if offset is None else json.dumps(encode(offset))
    return text if len(text) <= _LONGEST_OFFSET else f"{text[: _LONGEST_OFFSET - 1]}…"
