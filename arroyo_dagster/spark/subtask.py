"""What runs in the tasks behind a stage's shuffle: one subtask of an operator, from restore to checkpoint."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pendulum import DateTime
from pyspark import TaskContext

from arroyo_dagster.dataflow.operator import Operator, OperatorContext
from arroyo_dagster.dataflow.sink import StagedWriter
from arroyo_dagster.dataflow.tables import TableSpec
from arroyo_dagster.dataflow.watermarks import Clock, combine
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.log import ObjectStorage, names
from arroyo_dagster.model import Span, StagedOutput, from_micros, to_micros
from arroyo_dagster.spark.channels import ChannelBarrier, Receiver
from arroyo_dagster.spark.exchange import ExchangeWriter
from arroyo_dagster.spark.failures import explained
from arroyo_dagster.spark.reports import Exchange, SubtaskReport
from arroyo_dagster.spark.spec import SinkTask, StageTask
from arroyo_dagster.spark.upstream import Task, apply_steps, report_row
from arroyo_dagster.state.hashing import groups_of
from arroyo_dagster.state.manager import SubtaskTables
from arroyo_dagster.state.tables import Scope


def run_subtask(stage: StageTask) -> Task:
    """Take messages in, and give one row of metadata out."""

    def run(messages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        index = task.partitionId()
        yield report_row(index, Subtask(stage, index).run(messages))

    return run


class Subtask:
    """One subtask of an operator, for the length of one epoch."""

    def __init__(self, stage: StageTask, index: int) -> None:
        """Restore the tables from the parent epoch's files."""
        assert stage.operator is not None
        self._stage = stage
        self._index = index
        self._token = secrets.token_hex(8)  # a task may be tried again, or twice at once
        self._operator: Operator = stage.operator
        self._spans: list[Span] = []
        self._rows_in = 0
        with self._span("restore"):
            store = stage.state.open()
            scope = Scope(
                store,
                stage.directory,
                f"{index}-{self._token}",
                stage.legs[0].keys,
                groups_of(index, stage.key_groups, stage.parallelism) if stage.legs[0].keys else None,
                stage.key_groups,
            )
            specs = self._operator.tables()
            self._tables = SubtaskTables(specs, scope, index, stage.tables, stage.watermark)
        self._outputs = _Outputs(stage, store, f"{index}-{self._token}")
        self._context = SubtaskContext(stage, index, self._tables, self._outputs)

    def run(self, messages: Iterator[pa.RecordBatch]) -> SubtaskReport:
        """Go through the epoch."""
        try:
            return self._run(messages)
        finally:
            with self._explained("on_close"):
                self._operator.on_close(self._context)

    def _run(self, messages: Iterator[pa.RecordBatch]) -> SubtaskReport:
        stage, operator, context = self._stage, self._operator, self._context
        receiver = Receiver(
            stage.stage,
            self._index,
            stage.barrier.epoch,
            stage.attempt,
            [max(1, len(leg.partitions)) for leg in stage.legs],
            [leg.origin for leg in stage.legs],
        )
        with self._span("process"):
            with self._explained("on_start"):
                operator.on_start(context)
            for leg, batch in receiver.batches(messages):
                self._rows_in += batch.num_rows
                with self._explained("process_batch"):
                    operator.process_batch(batch, context, stage.legs[leg].input)
        with self._span("align"):
            barriers = receiver.align()
        clocks, now = self._clocks(barriers), stage.barrier.timestamp
        watermark = combine(clocks, now, stage.watermark)
        context.watermark = None if watermark is None else self._as_time(watermark)
        self._tables.watermark = watermark
        watermark_out = watermark
        if context.watermark is not None:
            with self._span("watermark"), self._explained("handle_watermark"):
                watermark_out = to_micros(operator.handle_watermark(context.watermark, context))
        self._checkpoint()
        with self._span("emit"):
            idle = all(clock.idle(now) for clock in clocks)
            staged, exchange = self._outputs.close(watermark_out, timed=bool(clocks), idle=idle)
        in_order = [barriers[channel] for channel in sorted(barriers)]
        return SubtaskReport(
            self._index,
            self._rows_in,
            self._outputs.rows,
            not self._tables.persisted,
            watermark,
            watermark_out,
            self._tables.reports(),
            staged,
            exchange,
            {**context.metrics, **self._tables.dropped()},
            tuple(self._spans),
            tuple(barrier.output for barrier in in_order),
            tuple(barrier.report for barrier in in_order if barrier.report is not None),
        )

    def _clocks(self, barriers: Mapping[tuple[int, int], ChannelBarrier]) -> list[Clock]:
        """How far event time has come on each leg that has it."""
        now, clocks = self._stage.barrier.timestamp, list[Clock]()
        for number, leg in enumerate(self._stage.legs):
            if leg.clock is not None:
                mine = [barrier for (of, _), barrier in barriers.items() if of == number]
                latest = max((barrier.latest for barrier in mine if barrier.latest is not None), default=None)
                clocks.append(leg.clock.advance(latest, sum(barrier.rows_read for barrier in mine), now))
        return clocks

    def _as_time(self, watermark: int) -> DateTime:
        try:
            return from_micros(watermark)
        except (OverflowError, ValueError, OSError) as error:
            raise AttemptError(
                f"operator {self._stage.stage!r}: the latest row of its input happened {watermark} microseconds after "
                "1970, in a year that no calendar has: mend its time in the source"
            ) from error

    def _checkpoint(self) -> None:
        with self._span("handle_checkpoint"), self._explained("handle_checkpoint"):
            persist = self._operator.handle_checkpoint(self._stage.barrier, self._context)
            if not isinstance(persist, bool):
                raise AttemptError(f"it must return True or False, not {persist!r}")
        if persist and (not self._tables.persisted or self._tables.dirty):
            with self._span("persist"):
                self._tables.checkpoint()
        self._tables.tidy()
        if dirty := self._tables.dirty:
            raise AttemptError(
                f"operator {self._stage.stage!r}, subtask {self._index}: handle_checkpoint said False, but table "
                f"{dirty!r} has rows that would be lost; say True, or call ctx.table_manager.discard() first"
            )

    @contextmanager
    def _span(self, step: str) -> Iterator[None]:
        start, clock = time.time_ns() // 1000, time.perf_counter_ns()
        yield
        micros = (time.perf_counter_ns() - clock) // 1000
        self._spans.append(Span(self._stage.stage, self._index, step, start, micros))

    def _explained(self, method: str) -> Any:
        return explained(f"operator {self._stage.stage!r}, subtask {self._index}: {method}")


class SubtaskContext(OperatorContext):
    """The context that an operator sees."""

    def __init__(self, stage: StageTask, index: int, tables: SubtaskTables, outputs: _Outputs) -> None:
        """Begin with the watermark that the parent epoch left."""
        self.operator = stage.stage
        self.subtask_index = index
        self.parallelism = stage.parallelism
        self.barrier = stage.barrier
        self.watermark: DateTime | None = None if stage.watermark is None else from_micros(stage.watermark)
        self.metrics = Counter()
        self.table_manager = tables
        self._tables = tables
        self._outputs = outputs

    def collect(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Send rows downstream."""
        for part in batch.combine_chunks().to_batches() if isinstance(batch, pa.Table) else [batch]:
            self._outputs.write(part)

    def table(self, table: TableSpec | str) -> Any:
        """One of the tables that `tables` has declared."""
        return self._tables.table(table)


class _Outputs:
    """Where a subtask's rows go: to sinks, and to later stages."""

    def __init__(self, stage: StageTask, store: ObjectStorage, token: str) -> None:
        self._stage = stage
        self._token = token
        self._writers: list[tuple[SinkTask, StagedWriter]] | None = None
        self._exchange = ExchangeWriter(store, lambda number: names.exchange_file(stage.directory, f"{token}-{number}"))
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        if self._writers is None:
            epoch, attempt = self._stage.barrier.epoch, self._stage.attempt
            self._writers = [
                (outlet, outlet.sink.writer(outlet.identity, epoch, attempt, f"{self._stage.stage}-{self._token}"))
                for outlet in self._stage.outlets
            ]
        for outlet, writer in self._writers:
            writer.write(apply_steps(batch, outlet.steps, outlet.identity.sink))
        if self._stage.exchanged:
            self._exchange.write(batch)

    def close(self, watermark: int | None, *, timed: bool, idle: bool) -> tuple[tuple[StagedOutput, ...], Exchange]:
        staged = tuple(StagedOutput(outlet.identity.sink, writer.close()) for outlet, writer in self._writers or ())
        return staged, self._exchange.close(watermark, timed=timed, idle=idle)
