"""What Dagster shows of an epoch: metadata of materializations. Pure, and made from the manifest alone.

Plain numbers, so that Dagster plots them over the epochs. Keys begin with `arroyo/`; `KEYS` says what each means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from arroyo_dagster.dataflow.graph import OperatorNode, SinkNode
from arroyo_dagster.model import Manifest, OperatorRecord, Span, from_micros, to_micros
from arroyo_dagster.orchestration.gantt import as_markdown, gantt
from arroyo_dagster.summary import slowest_ms, summarize

KEYS = {
    "epoch": "the epoch's number",
    "attempt": "which attempt at it succeeded",
    "parent": "the epoch that it was taken on top of",
    "barrier": "when its barrier was sent",
    "epoch_ms": "how long it took from then until its output was out",
    "commit_ms": "how long the manifest and the entry in the log took",
    "rows_in": "rows that reached the operator; before a window they may be partial aggregates",
    "rows_out": "rows that it emitted, or that the sink published",
    "late_rows": "rows that came too late for their window",
    "state_rows": "rows of state that the epoch names, those of earlier epochs among them",
    "state_bytes": "bytes of that state",
    "state_files": "files of that state",
    "delta_rows": "rows of state that this epoch has written",
    "delta_bytes": "bytes of these",
    "restore_ms": "opening the tables; like all times of steps, that of the slowest subtask",
    "process_ms": "taking rows in",
    "align_ms": "checking that every channel has delivered its barrier and all that it announced",
    "handle_checkpoint_ms": "the operator's `handle_checkpoint`",
    "persist_ms": "writing what changed in the tables",
    "emit_ms": "finishing the files of sinks and later stages",
    "watermark": "how far event time has come",
    "watermark_lag_s": "seconds between that and the barrier",
    "subtasks": "the same for each subtask",
    "barrier_way": "a picture of it: when each subtask was at which step",
    "metric/<name>": "a counter that the operator keeps in `ctx.metrics`",
    "bytes": "bytes of the files that the sink published",
    "files": "how many there are",
    "replay": "that its latest replay was identical",
    "publish_ms": "how long all sinks together took to publish",
}

_STEPS = ("restore", "process", "align", "handle_checkpoint", "persist", "emit")


@dataclass(frozen=True, slots=True)
class Timings:
    """What only the run that committed an epoch knows, in milliseconds."""

    epoch_ms: int
    commit_ms: int
    publish_ms: int


def metadata_of(node: OperatorNode | SinkNode, manifest: Manifest, timings: Timings | None = None) -> dict[str, Any]:
    """The metadata of one asset in one epoch."""
    values: dict[str, Any] = {
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "barrier": dg.MetadataValue.timestamp(manifest.barrier.timestamp),
    }
    if timings:
        values |= {"epoch_ms": timings.epoch_ms, "commit_ms": timings.commit_ms}
    own = _of_operator(node, manifest) if isinstance(node, OperatorNode) else _of_sink(node, manifest, timings)
    named = {f"arroyo/{key}": value for key, value in {**values, **own}.items()}
    if isinstance(node, SinkNode):
        named["dagster/partition_row_count"] = own["rows_out"]
    return named


def _of_operator(node: OperatorNode, manifest: Manifest) -> dict[str, Any]:
    tables = tuple(table for table in manifest.tables if table.operator == node.name)
    spans = tuple(span for span in manifest.spans if span.stage == node.name)
    record = next((record for record in manifest.operators if record.operator == node.name), None)
    summary = summarize(replace(manifest, tables=tables))
    values: dict[str, Any] = {
        "state_rows": summary.state_rows,
        "state_bytes": summary.state_bytes,
        "state_files": summary.files,
        "delta_rows": summary.delta_rows,
        "delta_bytes": summary.delta_bytes,
        **{f"{step}_ms": slowest_ms(spans, step) for step in _STEPS},
    }
    if record is not None:
        values |= {"rows_in": record.rows_in, "rows_out": record.rows_out, "late_rows": record.late_rows}
        values |= {f"metric/{name}": value for name, value in record.metrics.items()}
        if record.watermark is not None:
            lag = (to_micros(manifest.barrier.timestamp) - record.watermark) / 1_000_000
            values |= {"watermark": dg.MetadataValue.timestamp(from_micros(record.watermark)), "watermark_lag_s": lag}
        if record.subtasks:
            values["subtasks"] = _subtasks(record, spans)
    if spans:
        values["barrier_way"] = dg.MetadataValue.md(as_markdown(gantt(spans)))
    return values


def _of_sink(node: SinkNode, manifest: Manifest, timings: Timings | None) -> dict[str, Any]:
    files = [file for output in manifest.staged if output.sink == node.name for file in output.files]
    values = {
        "rows_out": sum(file.rows for file in files),
        "bytes": sum(file.bytes for file in files),
        "files": len(files),
    }
    return values | ({"publish_ms": timings.publish_ms} if timings else {})


def _subtasks(record: OperatorRecord, spans: Sequence[Span]) -> dg.TableMetadataValue:
    times: Mapping[int, dict[str, float]] = {number: {} for number in range(len(record.subtasks))}
    for span in spans:
        if span.step in _STEPS and span.subtask in times:
            times[span.subtask][f"{span.step}_ms"] = round(span.micros / 1000, 1)
    records = [
        dg.TableRecord(
            {
                "subtask": number,
                "rows_in": subtask.rows_in,
                "rows_out": subtask.rows_out,
                "skipped": number in record.skipped,
                **{f"{step}_ms": times[number].get(f"{step}_ms", 0.0) for step in _STEPS},
            }
        )
        for number, subtask in enumerate(record.subtasks)
    ]
    kinds = {"subtask": "int", "rows_in": "int", "rows_out": "int", "skipped": "bool"}
    columns = [dg.TableColumn(name, kind) for name, kind in kinds.items()]
    columns += [dg.TableColumn(f"{step}_ms", "float") for step in _STEPS]
    return dg.MetadataValue.table(records, dg.TableSchema(columns))
