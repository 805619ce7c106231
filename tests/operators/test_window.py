"""Windows, from rows to what is emitted, with no Spark: one combiner, one operator, tables in memory."""

from typing import Any

import pendulum
import pyarrow as pa
import pytest

from arroyo_dagster.dataflow import OperatorContext, agg
from arroyo_dagster.dataflow.graph import EventTime, WindowAggregate
from arroyo_dagster.dataflow.tables import TableSpec
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.log import ObjectStorage
from arroyo_dagster.model import CheckpointBarrier, FileEntry, ObjectPath, from_micros
from arroyo_dagster.operators import window
from arroyo_dagster.operators.partials import Partials
from arroyo_dagster.operators.window import WindowCombiner, WindowOperator
from arroyo_dagster.state.manager import SubtaskTables
from arroyo_dagster.state.tables import Scope

SECOND = 1_000_000
SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("us")), ("v", pa.int64()), ("unused", pa.int64())])
SPEC = WindowAggregate(
    ("k",), 10 * SECOND, EventTime("t"), (("n", agg.count()), ("s", agg.sum("v")), ("u", agg.count_distinct("v")))
)
PARTIALS = Partials.over(SPEC, SCHEMA)


def batch(*rows: tuple[str | None, int | None, int]) -> pa.RecordBatch:
    """Rows of key, second and value."""
    columns = {
        "k": [key for key, _, _ in rows],
        "t": [None if at is None else at * SECOND for _, at, _ in rows],
        "v": [value for _, _, value in rows],
        "unused": [0] * len(rows),
    }
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


class TestCombiner:
    # The watermark in seconds, and the seconds of the rows that are late for it; windows have ten.
    @pytest.mark.parametrize(
        ("watermark", "late"),
        [
            (None, [None]),
            (-100, [None]),
            (-1, [None, -15, -11]),
            (0, [None, -15, -11, -10, -1]),
            (9, [None, -15, -11, -10, -1]),
            (10, [None, -15, -11, -10, -1, 0, 9]),
            (19, [None, -15, -11, -10, -1, 0, 9]),
            (1000, [None, -15, -11, -10, -1, 0, 9, 10]),
        ],
    )
    def test_rows_of_closed_windows_and_rows_without_a_time_are_late(
        self, watermark: int | None, late: list[int | None]
    ) -> None:
        seconds = [None, -15, -11, -10, -1, 0, 9, 10]
        rows = batch(*(("a", second, 1) for second in seconds))
        combiner = WindowCombiner(SPEC, PARTIALS, None if watermark is None else watermark * SECOND)
        partials = pa.concat_tables(combiner.combine([rows]))
        taken = pa.concat_tables([*combiner.take_late(), SCHEMA.empty_table()])
        assert taken.schema == SCHEMA
        times = taken["t"].cast(pa.int64()).to_pylist()
        assert [None if at is None else at // SECOND for at in times] == late
        assert sum(partials["n"].to_pylist()) == len(seconds) - len(late)
        assert combiner.take_late() == []

    def test_rows_are_combined_over_batches_but_not_without_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(window, "_ROWS_AT_ONCE", 4)
        batches = [batch(("a", 1, 1), ("b", 2, 2))] * 5 + [batch()]
        tables = list(WindowCombiner(SPEC, PARTIALS, None).combine(batches))
        assert [sorted(table["n"].to_pylist()) for table in tables] == [[2, 2], [2, 2], [1, 1]]

    def test_no_rows_give_nothing(self) -> None:
        combiner = WindowCombiner(SPEC, PARTIALS, None)
        assert list(combiner.combine([])) == list(combiner.combine([batch()])) == combiner.take_late() == []

    @pytest.mark.parametrize("column", ["k", "t", "v"])
    def test_a_missing_column_is_named(self, column: str) -> None:
        rows = batch(("a", 1, 1)).drop_columns([column])
        with pytest.raises(AttemptError, match=f"the stream has no column '{column}'; it has "):
            list(WindowCombiner(SPEC, PARTIALS, None).combine([rows]))


class Context(OperatorContext):
    """What the operator sees, with tables in memory."""

    def __init__(self, tables: SubtaskTables) -> None:
        self.tables = tables
        self.emitted: list[pa.Table] = []

    def collect(self, batch: pa.RecordBatch | pa.Table) -> None:
        self.emitted.append(batch)

    def table(self, table: TableSpec | str) -> Any:
        return self.tables.table(table)


class Windows:
    """A window operator from epoch to epoch."""

    def __init__(self, store: ObjectStorage) -> None:
        self._store = store
        self._files: dict[str, tuple[FileEntry, ...]] = {}
        self._watermark: int | None = None
        self._epoch = 0

    def take(self, rows: list[pa.RecordBatch], watermark: int | None) -> list[dict[str, Any]]:
        """Go through an epoch, each batch on a channel of its own, and return what is emitted, by start and key."""
        self._epoch += 1
        scope = Scope(self._store, ObjectPath(f"epoch-{self._epoch}"), "0", ("k",), (0, 127), 128)
        operator = WindowOperator(SPEC, PARTIALS)
        tables = SubtaskTables(operator.tables(), scope, 0, self._files, self._watermark)
        context = Context(tables)
        combiner = WindowCombiner(SPEC, PARTIALS, self._watermark)
        operator.on_start(context)
        for part in rows:
            for partial in combiner.combine([part]):
                operator.process_batch(partial.combine_chunks().to_batches()[0], context)
        if watermark is not None:
            self._watermark = tables.watermark = watermark * SECOND
            assert operator.handle_watermark(from_micros(watermark * SECOND), context) == from_micros(self._watermark)
        assert operator.handle_checkpoint(CheckpointBarrier(self._epoch, 0, pendulum.now(), False), context)
        tables.checkpoint()
        self._files = {report.table: report.files for report in tables.reports()}
        emitted = [row for table in context.emitted for row in table.to_pylist()]
        return sorted(emitted, key=lambda row: (row["window_start"], row["k"]))


def out(key: str, start: int, n: int, s: int, u: int) -> dict[str, Any]:
    first = from_micros(start * SECOND).naive()
    return {"k": key, "window_start": first, "window_end": first.add(seconds=10), "n": n, "s": s, "u": u}


class TestOperator:
    def test_a_window_is_emitted_once_the_watermark_has_passed_its_end(self, memory_store: ObjectStorage) -> None:
        windows = Windows(memory_store)
        assert windows.take([batch(("a", 1, 5), ("a", 9, 5), ("b", 3, 1), ("a", 10, 7))], 9) == []
        assert windows.take([], 10) == [out("a", 0, 2, 10, 1), out("b", 0, 1, 1, 1)]
        assert windows.take([], 19) == []
        assert windows.take([], 20) == [out("a", 10, 1, 7, 1)]
        assert windows.take([], 1000) == []

    def test_rows_of_several_epochs_and_channels_meet(self, memory_store: ObjectStorage) -> None:
        windows = Windows(memory_store)
        for value in range(20):  # more epochs than a table has files
            assert windows.take([batch(("a", 1, value)), batch(("a", 2, value), ("b", 3, 1))], 5) == []
        assert windows.take([batch(("a", 4, 0), ("c", 4, 0))], 10) == [
            out("a", 0, 41, 380, 20),
            out("b", 0, 20, 20, 1),
            out("c", 0, 1, 0, 1),
        ]

    def test_a_window_that_gets_no_rows_in_its_last_epoch_is_emitted_whole(self, memory_store: ObjectStorage) -> None:
        windows = Windows(memory_store)
        windows.take([batch(("a", 1, 1))], None)
        windows.take([batch(("a", 2, 2))], None)
        assert windows.take([], 30) == [out("a", 0, 2, 3, 2)]

    def test_many_batches_are_merged_on_the_way(
        self, memory_store: ObjectStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(window, "_ROWS_IN_MEMORY", 3)
        windows = Windows(memory_store)
        assert windows.take([batch(("a", 1, 1), ("b", 2, 2))] * 10, 10) == [
            out("a", 0, 10, 10, 1),
            out("b", 0, 10, 20, 1),
        ]

    def test_windows_before_1970(self, memory_store: ObjectStorage) -> None:
        windows = Windows(memory_store)
        assert windows.take([batch(("a", -1, 1), ("a", -10, 2), ("a", -11, 4))], -10) == [out("a", -20, 1, 4, 1)]
        assert windows.take([], 0) == [out("a", -10, 2, 3, 2)]
