"""What runs in the tasks before a stage's shuffle: read splits, take stateless steps, aggregate, route, send barriers.

Spark's own steps may lie between reading and sending. Then these are two functions in two Python workers of one task,
and the one tells the other what it has read by a file on the disk that both see.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyspark import TaskContext

from arroyo_dagster.dataflow.graph import MapBatches
from arroyo_dagster.dataflow.sink import StagedWriter
from arroyo_dagster.dataflow.source import ReadReport
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.model import FileEntry
from arroyo_dagster.operators.window import WindowCombiner
from arroyo_dagster.spark.channels import Sender, SenderReport
from arroyo_dagster.spark.failures import explained
from arroyo_dagster.spark.reports import WriterReport
from arroyo_dagster.spark.spec import LegTask, SinkTask, StageTask
from arroyo_dagster.state.times import to_micros

Task: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

READER = "arroyo_dagster_read"
"""What those who read rows for Spark are called in its plans."""

REPORT = pa.schema([("subtask", pa.int32()), ("report", pa.string())])


@dataclass(slots=True)
class Tally:
    """What a task has read so far; times are in microseconds since 1970."""

    partition: int
    start: int
    rows: int = 0
    latest: int | None = None
    quarantined: tuple[str, ...] = ()


def read_and_send(stage: StageTask, leg: LegTask) -> Task:
    """The whole way from splits to messages, for a leg that is Arrow all along."""

    def run(partition_ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tally = _begin(partition_ids)
        rows = _stepped(_read(leg, tally), leg.first_steps, leg.stage)
        yield from _deliver(stage, leg, rows, lambda: tally)

    return run


def read(leg: LegTask, schema: pa.Schema) -> Task:
    """The way from splits to rows for Spark."""

    def run(partition_ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tally, path = _begin(partition_ids), _tally_file(leg)
        _save(tally, path)
        for batch in _stepped(_read(leg, tally), leg.first_steps, leg.stage):
            yield conformed(batch, schema, f"the rows of {leg.origin}")
        _save(tally, path)

    run.__name__ = READER
    return run


def send(stage: StageTask, leg: LegTask, schema: pa.Schema) -> Task:
    """The way from Spark's rows to messages."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        path = _tally_file(leg)
        rows = (conformed(batch, schema, f"the rows of {leg.origin}") for batch in batches)
        steps = _stepped(rows, leg.last_steps, leg.stage)
        try:
            yield from _deliver(stage, leg, steps, lambda: decode(Tally, json.loads(path.read_text()), str(path)))
        finally:
            path.unlink(missing_ok=True)

    return run


def apply_functions(steps: Sequence[MapBatches], schema: pa.Schema, where: str) -> Task:
    """Functions of the user's between two steps of Spark's."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in _stepped(batches, steps, where):
            yield conformed(batch, schema, f"the rows before {where}")

    return run


def conformed(batch: pa.RecordBatch, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """Give rows just this schema, whatever order, width and nullability they come with."""
    if batch.schema.equals(schema):
        return batch
    missing = [name for name in schema.names if name not in batch.schema.names]
    if missing:
        raise AttemptError(f"{what} have no column {missing[0]!r}; they have {', '.join(batch.schema.names)}")
    try:
        # What is finer than a microsecond is cut off.
        columns = [
            batch.column(field.name).cast(field.type, safe=not types.is_timestamp(field.type)) for field in schema
        ]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise AttemptError(f"{what} do not fit their schema: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def report_row(subtask: int, report: object) -> pa.RecordBatch:
    """One row for the driver."""
    text = json.dumps(encode(report))
    return pa.RecordBatch.from_arrays([pa.array([subtask], pa.int32()), pa.array([text])], schema=REPORT)


def apply_steps(batch: pa.RecordBatch, steps: Sequence[MapBatches], where: str) -> pa.RecordBatch:
    """Put a batch through functions of the user's."""
    for step in steps:
        name = getattr(step.function, "__name__", type(step.function).__name__)
        with explained(f"map_batches({name}) before {where}"):
            batch = step.function(batch)
        if not isinstance(batch, pa.RecordBatch):
            raise AttemptError(f"map_batches({name}) before {where} returned {type(batch).__name__}, not a RecordBatch")
        if step.schema is not None:
            batch = conformed(batch, step.schema, f"the rows of map_batches({name}) before {where}")
    return batch


def _begin(partition_ids: Iterator[pa.RecordBatch]) -> Tally:
    [partition] = [number for batch in partition_ids for number in batch.column(0).to_pylist()]
    return Tally(partition, time.time_ns() // 1000)


def _read(leg: LegTask, tally: Tally) -> Iterator[pa.RecordBatch]:
    """Read the splits of one partition, and count what is read."""
    report = ReadReport()
    for split in leg.partitions[tally.partition] if leg.partitions else ():
        for batch in leg.source.read(split, leg.columns, report):
            tally.rows += batch.num_rows
            latest = None if leg.event_time is None else pc.max(to_micros(batch.column(leg.event_time.column))).as_py()
            if latest is not None:
                tally.latest = latest if tally.latest is None else max(tally.latest, latest)
            yield batch
    tally.quarantined = tuple(report.quarantined)


def _stepped(batches: Iterator[pa.RecordBatch], steps: Sequence[MapBatches], where: str) -> Iterator[pa.RecordBatch]:
    return (apply_steps(batch, steps, where) for batch in batches) if steps else batches


def _deliver(
    stage: StageTask, leg: LegTask, batches: Iterator[pa.RecordBatch], tally: Callable[[], Tally]
) -> Iterator[pa.RecordBatch]:
    """Send rows on their way. `tally` knows the partition from the first batch on, and the rest at the end."""
    first = next(batches, None)
    rows = batches if first is None else chain([first], batches)
    yield from (_write if stage.operator is None else _send)(stage, leg, rows, tally().partition, tally)


def _send(
    stage: StageTask, leg: LegTask, batches: Iterator[pa.RecordBatch], partition: int, tally: Callable[[], Tally]
) -> Iterator[pa.RecordBatch]:
    """Aggregate what can be aggregated, and send it to the subtasks; then a barrier to every one."""
    sender = Sender(leg.number, partition, stage.parallelism, leg.keys, stage.key_groups)
    late = _Output(stage.window.late if stage.window else None, stage, f"late-{leg.number}-{partition}")
    late_rows = 0
    if stage.window is None:
        for batch in batches:
            yield from sender.send(pa.Table.from_batches([batch]))
    else:
        combiner = WindowCombiner(stage.window.spec, stage.window.partials, stage.watermark)
        for partials in combiner.combine(batches):
            yield from sender.send(partials)
            late_rows += sum(map(late.write, combiner.take_late()))
        late_rows += sum(map(late.write, combiner.take_late()))
    late_files = late.close()
    read = tally()
    report = _report(leg, read, sender.rows_sent, late_rows, late_files)
    yield from sender.barriers(stage.barrier.epoch, stage.attempt, report)


def _write(
    stage: StageTask, leg: LegTask, batches: Iterator[pa.RecordBatch], partition: int, tally: Callable[[], Tally]
) -> Iterator[pa.RecordBatch]:
    """Write rows to the sink right here."""
    output = _Output(stage.outlets[0], stage, f"{leg.number}-{partition}")
    rows = sum(output.write(pa.Table.from_batches([batch])) for batch in batches)
    files = output.close()
    read = tally()
    yield report_row(partition, WriterReport(_report(leg, read, rows, 0, ()), files))


class _Output:
    """A sink's writer that is opened for the first row; without a sink, rows are only counted."""

    def __init__(self, sink: SinkTask | None, stage: StageTask, name: str) -> None:
        self._sink = sink
        self._stage = stage
        self._name = f"{name}-{secrets.token_hex(8)}"  # a task may be tried again, or twice at once
        self._writer: StagedWriter | None = None

    def write(self, rows: pa.Table) -> int:
        if self._sink is not None and rows.num_rows:
            if self._writer is None:
                epoch, attempt = self._stage.barrier.epoch, self._stage.attempt
                self._writer = self._sink.sink.writer(self._sink.identity, epoch, attempt, self._name)
            for batch in rows.to_batches():
                self._writer.write(batch)
        return int(rows.num_rows)

    def close(self) -> tuple[FileEntry, ...]:
        return self._writer.close() if self._writer else ()


def _report(
    leg: LegTask, tally: Tally, rows_sent: int, late_rows: int, late_files: tuple[FileEntry, ...]
) -> SenderReport:
    micros = time.time_ns() // 1000 - tally.start
    return SenderReport(
        leg.number,
        tally.partition,
        tally.rows,
        tally.latest,
        rows_sent,
        late_rows,
        late_files,
        tally.quarantined,
        tally.start,
        micros,
    )


def _tally_file(leg: LegTask) -> Path:
    task = TaskContext.get()
    assert task is not None
    return Path(tempfile.gettempdir(), f"arroyo_dagster-{leg.token}-{leg.number}-{task.taskAttemptId()}.json")


def _save(tally: Tally, path: Path) -> None:
    written = path.with_suffix(".new")
    written.write_text(json.dumps(encode(tally)))
    written.replace(path)
