"""The built-in aggregate over tumbling windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc
from pendulum import DateTime

from arroyo_dagster.dataflow.graph import WindowAggregate
from arroyo_dagster.dataflow.operator import Operator, OperatorContext
from arroyo_dagster.dataflow.stream import WINDOW_START
from arroyo_dagster.dataflow.tables import TableSpec, TimeTable
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.model import CheckpointBarrier, to_micros
from arroyo_dagster.operators.partials import NO_TIME, Partials

_ROWS_IN_MEMORY = 1 << 22
_ROWS_AT_ONCE = 1 << 20
_SAMPLE = 1 << 15
_WORTHWHILE = 0.8


class WindowCombiner:
    """Aggregates rows before the shuffle, where that makes them fewer, and sets those aside whose window is closed.

    `watermark` is the one that the parent epoch left, so it does not matter where in the epoch a row stands.
    """

    def __init__(self, spec: WindowAggregate, partials: Partials, watermark: int | None) -> None:
        """Begin with no rows."""
        self._partials = partials
        self._closed = None if watermark is None else watermark // spec.size * spec.size
        self._columns = [*spec.keys, spec.event_time.column, *(agg.column for _, agg in spec.aggregates if agg.column)]
        self._late: list[pa.Table] = []

    def combine(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Turn rows into partials, about a million rows at a time."""
        waiting: list[pa.RecordBatch] = []
        rows = 0
        for batch in batches:
            missing = [column for column in self._columns if column not in batch.schema.names]
            if missing:
                raise AttemptError(f"the stream has no column {missing[0]!r}; it has {', '.join(batch.schema.names)}")
            waiting.append(batch)
            rows += batch.num_rows
            if rows >= _ROWS_AT_ONCE:
                yield self._partial(pa.Table.from_batches(waiting))
                waiting, rows = [], 0
        if rows:
            yield self._partial(pa.Table.from_batches(waiting))

    def take_late(self) -> list[pa.Table]:
        """Hand over the late rows since the last call."""
        late, self._late = self._late, []
        return late

    def _partial(self, rows: pa.Table) -> pa.Table:
        times = self._partials.times(rows)
        late = times < (NO_TIME + 1 if self._closed is None else self._closed)
        if late.any():
            self._late.append(rows.filter(pa.array(late)))
            rows, times = rows.filter(pa.array(~late)), times[~late]
        if rows.num_rows > _SAMPLE:
            sample = self._partials.make(rows.slice(0, _SAMPLE), times[:_SAMPLE])
            if sample.num_rows > _WORTHWHILE * _SAMPLE:
                return self._partials.spread(rows, times)
        return self._partials.make(rows, times)


class WindowOperator(Operator):
    """Merges partial aggregates, and emits a window's rows once the watermark has passed its end.

    Open windows lie in a TimeTable to which every epoch appends its partials; what is stored is read when its window
    closes, and not before.
    """

    def __init__(self, spec: WindowAggregate, partials: Partials) -> None:
        """Aggregate what `partials` makes."""
        self._size = spec.size
        self._partials = partials
        self._table = TimeTable(
            "windows", partials.schema, WINDOW_START, timedelta(microseconds=spec.size), combine=partials.merge
        )

    def tables(self) -> Sequence[TableSpec]:
        """The partials of all open windows."""
        return (self._table,)

    def on_start(self, ctx: OperatorContext) -> None:
        """Begin with nothing received."""
        self._received = [self._partials.schema.empty_table()]
        self._rows = 0
        self._most = _ROWS_IN_MEMORY

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:  # noqa: A002
        """Take partials."""
        self._received.append(pa.Table.from_batches([batch]))
        self._rows += batch.num_rows
        if self._rows > self._most:
            self._received = [self._partials.merge(pa.concat_tables(self._received))]
            self._rows = self._received[0].num_rows
            self._most = max(_ROWS_IN_MEMORY, 2 * self._rows)  # so that each row is merged a few times at most

    def handle_watermark(self, watermark: DateTime, ctx: OperatorContext) -> DateTime:
        """Close the windows that end at the watermark or before it."""
        last_start = to_micros(watermark) - self._size
        received = pa.concat_tables(self._received)
        closes = pc.less_equal(received[WINDOW_START].cast(pa.int64()), last_start)
        closed = pa.concat_tables([ctx.table(self._table).scan(end=last_start + 1), received.filter(closes)])
        self._received = [received.filter(pc.invert(closes))]
        if closed.num_rows:
            ctx.collect(self._partials.finish(self._partials.merge(closed)))
        return watermark

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        """Keep the partials of windows that are still open."""
        ctx.table(self._table).append(self._partials.merge(pa.concat_tables(self._received)))
        return True
