"""State tables against dicts and lists: what a table says must not depend on epochs, files or parallelism."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster.dataflow import GlobalTable, KeyedTable, TimeTable
from arroyo_dagster.dataflow.tables import TableSpec
from arroyo_dagster.errors import AttemptError, ConfigurationError
from arroyo_dagster.log import ObjectStorage, Store, open_store
from arroyo_dagster.model import FileEntry, ObjectPath, TableFiles
from arroyo_dagster.state import keyed_table
from arroyo_dagster.state.hashing import groups_of, key_groups, subtasks_of
from arroyo_dagster.state.keyed_table import KeyedRowsTable
from arroyo_dagster.state.manager import SubtaskTables, gather
from arroyo_dagster.state.tables import MAX_FILES, Scope
from arroyo_dagster.state.time_table import TimeRowsTable
from arroyo_dagster.testing import FaultyStore

GROUPS = 128
NUMBERS = pa.schema([("k", pa.int64()), ("v", pa.int64())])
NAMES = pa.schema([("first", pa.string()), ("v", pa.float64()), ("second", pa.int32())])
TIMES = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64())])


class Operator:
    """The tables of an operator with any number of subtasks, from epoch to epoch."""

    def __init__(self, spec: TableSpec, keys: tuple[str, ...] = ("k",), store: Store | None = None) -> None:
        self.spec = spec
        self.store = store or open_store("memory://")
        self.watermark: int | None = None
        self.files: tuple[FileEntry, ...] = ()
        self._keys = keys
        self._opened = 0

    def open(self, parallelism: int = 1) -> list[Any]:
        """Restore the tables of all subtasks."""
        self._opened += 1
        self._subtasks = [
            SubtaskTables(
                (self.spec,),
                Scope(
                    self.store,
                    ObjectPath(f"epoch-{self._opened}"),
                    str(index),
                    self._keys,
                    groups_of(index, GROUPS, parallelism),
                    GROUPS,
                ),
                index,
                {self.spec.name: self.files},
                self.watermark,
            )
            for index in range(parallelism)
        ]
        return [subtask.table(self.spec) for subtask in self._subtasks]

    def checkpoint(self, watermark: int | None = None) -> None:
        """Persist the tables of all subtasks."""
        self.watermark = watermark
        for subtask in self._subtasks:
            subtask.watermark = watermark
            subtask.checkpoint()
            assert subtask.dirty is None
        [table] = gather("operator", [subtask.reports() for subtask in self._subtasks])
        assert table == TableFiles("operator", self.spec.name, table.files)
        self.files = table.files

    def routed(self, rows: pa.Table, parallelism: int) -> Iterator[pa.Table]:
        """What each subtask gets of some rows."""
        groups = key_groups([rows[key] for key in self._keys], GROUPS)
        owners = subtasks_of(groups, GROUPS, parallelism)
        return (rows.filter(pa.array(owners == subtask)) for subtask in range(parallelism))

    def content(self, parallelism: int = 1) -> list[tuple[Any, ...]]:
        """All rows, as the tables of that many subtasks have them."""
        tables = self.open(parallelism)
        return content(pa.concat_tables(table.scan() for table in tables))


def content(table: pa.Table) -> list[tuple[Any, ...]]:
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return sorted(rows, key=repr)


def numbers(rows: dict[int | None, int | None]) -> pa.Table:
    return pa.table({"k": list(rows.keys()), "v": list(rows.values())}, NUMBERS)


def keys_of(schema: pa.Schema, key: Sequence[str], values: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = zip(*values, strict=True) if values else [[] for _ in key]
    return pa.table(
        [pa.array(list(column), schema.field(name).type) for name, column in zip(key, columns, strict=True)], key
    )


# What is done to a table: each step is a word and rows or keys.
number_keys = st.tuples(st.integers(0, 12) | st.none())
name_keys = st.tuples(st.sampled_from(["a", "b", "", "ab", None]), st.sampled_from([1, 2, None]))
float_keys = st.tuples(st.sampled_from([0.0, -0.0, 1.5, math.nan, -math.nan, None]))


def steps_over(keys: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    step = st.one_of(
        st.tuples(st.just("upsert"), st.lists(st.tuples(keys, st.integers(-9, 9) | st.none()), max_size=8)),
        st.tuples(st.just("delete"), st.lists(keys, max_size=4)),
        st.tuples(st.just("get"), st.lists(keys, max_size=8)),
        st.tuples(st.sampled_from(["checkpoint", "discard", "reopen", "scan"]), st.none()),
    )
    return st.lists(step, max_size=40)


def canonical_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("nan" if isinstance(part, float) and math.isnan(part) else part for part in key)


def check_keyed(spec: KeyedTable | GlobalTable, stream_keys: tuple[str, ...], steps: list[tuple[str, Any]]) -> None:
    """Do the same to the table and to a dict, and compare."""
    [value] = [name for name in spec.schema.names if name not in spec.key]
    operator = Operator(spec, stream_keys)
    [table] = operator.open()
    saved: dict[tuple[Any, ...], Any] = {}
    model = dict(saved)
    for word, rows in steps:
        if word == "upsert":
            given_rows = keys_of(spec.schema, spec.key, [key for key, _ in rows])
            given_rows = given_rows.append_column(value, pa.array([v for _, v in rows], spec.schema.field(value).type))
            table.upsert(given_rows)
            model |= {canonical_key(key): v for key, v in rows}
        elif word == "delete":
            table.delete(keys_of(spec.schema, spec.key, rows))
            for key in rows:
                model.pop(canonical_key(key), None)
        elif word == "get":
            found = table.get(keys_of(spec.schema, spec.key, rows))
            assert found.column_names == [*spec.schema.names, "found"]
            assert found["found"].to_pylist() == [canonical_key(key) in model for key in rows]
            assert found[value].to_pylist() == [model.get(canonical_key(key)) for key in rows]
        elif word == "checkpoint":
            operator.checkpoint()
            saved = dict(model)
        elif word == "discard":
            table.discard()
            model = dict(saved)
        elif word == "reopen":
            [table] = operator.open()
            model = dict(saved)
        scanned = table.scan()
        assert scanned.schema.names == spec.schema.names
        key_rows = zip(*(scanned[name].to_pylist() for name in spec.key), strict=True)
        rows_now = dict(zip(map(canonical_key, key_rows), scanned[value].to_pylist(), strict=True))
        assert rows_now == model
        assert scanned.num_rows == len(model)
        assert len(table.files) <= MAX_FILES


class TestKeyedTable:
    @settings(max_examples=60, deadline=None)
    @given(steps_over(number_keys))
    def test_is_a_dict(self, steps: list[tuple[str, Any]]) -> None:
        check_keyed(KeyedTable("t", NUMBERS, ("k",)), ("k",), steps)

    @settings(max_examples=40, deadline=None)
    @given(steps_over(name_keys))
    def test_is_a_dict_with_keys_of_several_columns(self, steps: list[tuple[str, Any]]) -> None:
        check_keyed(KeyedTable("t", NAMES, ("first", "second")), ("second",), steps)

    @settings(max_examples=40, deadline=None)
    @given(steps_over(float_keys))
    def test_has_one_zero_and_one_nan(self, steps: list[tuple[str, Any]]) -> None:
        check_keyed(KeyedTable("t", pa.schema([("k", pa.float64()), ("v", pa.int64())]), ("k",)), ("k",), steps)

    @pytest.mark.parametrize("buckets", [1, 3])
    def test_keys_that_collide_are_told_apart(self, buckets: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def few(columns: Sequence[Any]) -> Any:
            return key_groups(columns, buckets).astype(np.uint64)

        monkeypatch.setattr(keyed_table, "key_hashes", few)

        @settings(max_examples=30, deadline=None)
        @given(steps_over(number_keys))
        def check(steps: list[tuple[str, Any]]) -> None:
            check_keyed(KeyedTable("t", NUMBERS, ("k",)), ("k",), steps)

        check()
        nan = pa.schema([("k", pa.float64()), ("v", pa.int64())])
        upserts = [("upsert", [((math.nan,), 1), ((None,), 2), ((0.0,), 3)]), ("get", [(math.nan,), (None,), (-0.0,)])]
        check_keyed(KeyedTable("t", nan, ("k",)), ("k",), upserts)

    def test_of_several_rows_with_one_key_the_last_counts(self) -> None:
        [table] = Operator(KeyedTable("t", NUMBERS, ("k",))).open()
        table.upsert(pa.table({"k": [1, 2, 1, 1], "v": [1, 2, 3, 4]}))
        assert content(table.scan()) == [(1, 4), (2, 2)]

    def test_columns_may_come_in_any_order_and_width_with_others_beside_them(self) -> None:
        [table] = Operator(KeyedTable("t", NUMBERS, ("k",))).open()
        table.upsert(pa.table({"other": ["x"], "v": pa.array([2], pa.int8()), "k": pa.array([1], pa.uint16())}))
        assert table.get(pa.table({"k": pa.array([1], pa.int16()), "v": [9]})).to_pylist() == [
            {"k": 1, "v": 2, "found": True}
        ]

    @pytest.mark.parametrize(
        ("rows", "complaint"),
        [
            (pa.table({"k": [1]}), "rows for table 't' lack the column 'v': they have k"),
            (pa.table({"k": ["x"], "v": [1]}), "rows for table 't' do not fit its schema: .*"),
            (pa.table({"k": [1.5], "v": [1]}), "rows for table 't' do not fit its schema: .*"),
        ],
    )
    def test_rows_that_do_not_fit_are_refused(self, rows: pa.Table, complaint: str) -> None:
        [table] = Operator(KeyedTable("t", NUMBERS, ("k",))).open()
        with pytest.raises(ConfigurationError, match=complaint):
            table.upsert(rows)
        assert not table.dirty

    def test_a_row_whose_home_is_another_subtask_is_refused(self) -> None:
        operator = Operator(KeyedTable("t", NUMBERS, ("k",)))
        first, _ = operator.open(2)
        first.upsert(numbers(dict.fromkeys(range(50), 0)))
        with pytest.raises(AttemptError, match=r"table 't' has a row with the key \{'k': \d+\}, whose home is another"):
            operator.checkpoint()

    def test_rows_without_nulls_can_be_deleted(self) -> None:
        schema = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.int64(), nullable=False)])
        operator = Operator(KeyedTable("t", schema, ("k",)))
        [table] = operator.open()
        table.upsert(pa.table({"k": [1, 2], "v": [1, 2]}))
        operator.checkpoint()
        [table] = operator.open()
        table.delete(pa.table({"k": [1]}))
        operator.checkpoint()
        assert operator.content() == [(2, 2)]

    def test_nothing_changed_writes_nothing(self) -> None:
        operator = Operator(KeyedTable("t", NUMBERS, ("k",)))
        [table] = operator.open()
        table.upsert(numbers({1: 1}))
        operator.checkpoint()
        files = operator.files
        operator.open()
        operator.checkpoint()
        assert operator.files == files

    def test_may_be_persisted_more_than_once_in_an_epoch(self) -> None:
        operator = Operator(KeyedTable("t", NUMBERS, ("k",)))
        [table] = operator.open()
        for value in range(3):
            table.upsert(numbers({value: value}))
            operator.checkpoint()
        assert operator.content() == [(0, 0), (1, 1), (2, 2)]

    def test_many_files_after_a_change_of_parallelism_are_merged_at_once(self) -> None:
        random = np.random.default_rng(3)
        operator = Operator(KeyedTable("t", NUMBERS, ("k",)))
        for epoch in range(MAX_FILES):  # large files first, small ones last
            keys = np.arange(20_000 if epoch < MAX_FILES // 2 else 40)
            rows = pa.table({"k": keys + 20_000 * epoch, "v": random.integers(0, 1 << 60, len(keys))})
            for table, part in zip(operator.open(4), operator.routed(rows, 4), strict=True):
                table.upsert(part)
            operator.checkpoint()
        before = operator.content()
        [table] = operator.open()
        assert len(table.files) > 2 * MAX_FILES
        table.upsert(numbers({-1: 0}))
        operator.checkpoint()
        assert len(operator.files) <= MAX_FILES
        assert operator.content() == sorted([*before, (-1, 0)], key=repr)

    def test_what_is_deleted_leaves_no_file(self) -> None:
        operator = Operator(KeyedTable("t", NUMBERS, ("k",)))
        for _ in range(MAX_FILES):
            [table] = operator.open()
            table.upsert(numbers({1: 1}))
            operator.checkpoint()
        [table] = operator.open()
        table.delete(numbers({1: 1}))
        operator.checkpoint()
        assert operator.files == ()

    def test_an_epoch_that_changes_one_in_a_hundred_writes_about_that_much(self) -> None:
        random = np.random.default_rng(7)
        operator = Operator(KeyedTable("t", NUMBERS, ("k",)))
        [table] = operator.open()
        table.upsert(pa.table({"k": random.permutation(200_000), "v": random.integers(0, 1 << 60, 200_000)}))
        operator.checkpoint()
        whole = {file.path: file.bytes for file in operator.files}
        written = Counter[str]()
        for _ in range(30):
            [table] = operator.open()
            changed = random.choice(200_000, 2_000, replace=False)
            table.upsert(pa.table({"k": changed, "v": random.integers(0, 1 << 60, 2_000)}))
            operator.checkpoint()
            written.update({file.path: file.bytes for file in operator.files if file.path not in {*whole, *written}})
        assert len(written) == 30
        assert sorted(written.values())[15] < 0.02 * sum(whole.values())
        assert sum(written.values()) / 30 < 0.04 * sum(whole.values())  # merges included
        assert set(whole) <= {file.path for file in operator.files}


class TestGlobalTable:
    @settings(max_examples=40, deadline=None)
    @given(steps_over(number_keys))
    def test_is_a_dict(self, steps: list[tuple[str, Any]]) -> None:
        check_keyed(GlobalTable("t", NUMBERS, ("k",)), (), steps)

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(1, 4),
                st.dictionaries(
                    st.tuples(st.integers(0, 3), st.integers(0, 5)), st.integers(0, 9) | st.none(), max_size=6
                ),
            ),
            max_size=15,
        )
    )
    def test_of_several_subtasks_the_one_with_the_highest_index_wins(
        self, epochs: list[tuple[int, dict[tuple[int, int], int | None]]]
    ) -> None:
        operator = Operator(GlobalTable("t", NUMBERS, ("k",)))
        model: dict[int, int] = {}
        for parallelism, writes in epochs:
            tables = operator.open(parallelism)
            for table in tables:  # each sees what the epoch before has left, whole
                assert content(table.scan()) == sorted(model.items(), key=repr)
            in_order = sorted(
                (subtask % parallelism, place, key, value)
                for place, ((subtask, key), value) in enumerate(writes.items())
            )
            for subtask, _, key, value in in_order:
                (tables[subtask].delete if value is None else tables[subtask].upsert)(numbers({key: value}))
                model.pop(key, None)
                if value is not None:
                    model[key] = value
            operator.checkpoint()
            assert len(operator.files) <= MAX_FILES + parallelism

    def test_only_the_first_subtask_merges_files(self) -> None:
        operator = Operator(GlobalTable("t", NUMBERS, ("k",)))
        names = set[str]()
        for epoch in range(40):
            for subtask, table in enumerate(operator.open(3)):
                if subtask or epoch % 5 == 0:
                    table.upsert(numbers({10 * subtask + epoch % 3: epoch}))
            operator.checkpoint()
            names |= {file.path for file in operator.files}
            assert len(operator.files) <= MAX_FILES + 3
        merged = [name for name in names if "/t/0-" in name]
        assert len(merged) > 8  # more than it has written of its own
        assert operator.content(2) == sorted(operator.content(1) * 2, key=repr)


def timed(rows: Sequence[tuple[int, int, int]]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[], [], []]
    return pa.table(
        [pa.array(list(column), kind) for column, kind in zip(columns, TIMES.types, strict=True)], TIMES.names
    )


def untimed(table: pa.Table) -> list[tuple[Any, ...]]:
    return content(table.set_column(1, "t", table["t"].cast(pa.int64())))


time_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(-30, 60), st.integers(0, 2)), max_size=8)
time_steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), time_rows),
        st.tuples(st.just("scan"), st.tuples(st.integers(-30, 60) | st.none(), st.integers(-30, 60) | st.none())),
        st.tuples(st.just("checkpoint"), st.integers(0, 8)),
        st.tuples(st.just("discard"), st.none()),
    ),
    max_size=40,
)


def added_up(rows: pa.Table) -> pa.Table:
    return rows.group_by(["k", "t"]).aggregate([("v", "sum")]).rename_columns({"v_sum": "v"})


class TestTimeTable:
    @pytest.mark.parametrize("retention", [0, 5])
    @pytest.mark.parametrize("combine", [None, added_up], ids=["plain", "combined"])
    def test_is_a_list_that_loses_what_is_behind_the_watermark(
        self, retention: int, combine: Callable[[pa.Table], pa.Table] | None
    ) -> None:
        spec = TimeTable("t", TIMES, "t", f"{retention} us", combine)

        def seen(rows: pa.Table) -> list[tuple[Any, ...]]:
            return untimed(rows if combine is None else added_up(rows).select(TIMES.names))

        @settings(max_examples=50, deadline=None)
        @given(time_steps)
        def check(steps: list[tuple[str, Any]]) -> None:
            operator = Operator(spec)
            [table] = operator.open()
            saved: list[tuple[int, int, int]] = []
            model, watermark = list(saved), None
            for word, what in steps:
                if word == "append":
                    table.append(timed(what))
                    model += [row for row in what if watermark is None or row[1] > watermark - retention]
                elif word == "scan":
                    start, end = what
                    wanted = [
                        row for row in model if (start is None or start <= row[1]) and (end is None or row[1] < end)
                    ]
                    assert seen(table.scan(start, end)) == seen(timed(wanted))
                elif word == "checkpoint":
                    watermark = what if watermark is None else watermark + what
                    operator.checkpoint(watermark)
                    model = saved = [row for row in model if row[1] > watermark - retention]
                    model = list(saved)
                    [table] = operator.open()
                else:
                    table.discard()
                    model = list(saved)
                assert seen(table.scan()) == seen(timed(model))
                assert len(table.files) <= MAX_FILES

        check()

    @pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
    def test_times_may_be_of_any_unit(self, unit: str) -> None:
        schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp(unit))])
        operator = Operator(TimeTable("t", schema, "t", "1 second"))
        [table] = operator.open()
        seconds = pa.array([-5, -1, 0, 3], pa.timestamp("s"))
        table.append(pa.table({"k": [0, 1, 2, 3], "t": seconds.cast(pa.timestamp(unit))}))
        assert table.scan(-1_000_000, 1)["k"].to_pylist() == [1, 2]
        operator.checkpoint(-2_000_000)
        [table] = operator.open()
        assert table.scan()["k"].to_pylist() == [1, 2, 3]
        assert table.scan().schema == schema
        assert [file.times for file in operator.files] == [(-1_000_000, 3_000_000)]

    def test_a_nanosecond_before_is_before(self) -> None:
        schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("ns"))])
        [table] = Operator(TimeTable("t", schema, "t")).open()
        table.append(pa.table({"k": [0, 1], "t": pa.array([-1, 0], pa.timestamp("ns"))}))
        assert table.scan(end=0)["k"].to_pylist() == [0]

    def test_a_row_without_a_time_is_refused(self) -> None:
        [table] = Operator(TimeTable("t", TIMES, "t")).open()
        with pytest.raises(ConfigurationError, match="table 't': a row has no time in 't'"):
            table.append(pa.table({"k": [1], "t": pa.array([None], TIMES.field("t").type), "v": [1]}))

    def test_only_the_files_that_are_needed_are_read(self, memory_store: ObjectStorage) -> None:
        store = FaultyStore(memory_store)
        operator = Operator(TimeTable("t", TIMES, "t"), store=store)
        for epoch in range(5):
            [table] = operator.open()
            table.append(timed([(1, 10 * epoch + 1, 0), (1, 10 * epoch + 5, 0)]))
            operator.checkpoint(0)
        [table] = operator.open()
        paths = [file.path for file in operator.files]

        def read_by(action: Callable[[], object]) -> list[str]:
            store.calls.clear()
            action()
            return [call.path for call in store.calls if call.operation == "read"]

        assert read_by(lambda: table.scan(10, 11)) == []
        assert read_by(lambda: table.scan(11, 12)) == [paths[1]]
        assert read_by(lambda: table.scan(end=12)) == paths[:2]
        assert read_by(lambda: table.scan(start=35)) == paths[3:]
        assert read_by(table.scan) == paths
        assert read_by(lambda: operator.checkpoint(25)) == []  # three files are wholly behind it
        assert [file.path for file in operator.files] == paths[3:]

    def test_files_behind_the_watermark_leave_before_others_are_merged(self, memory_store: ObjectStorage) -> None:
        store = FaultyStore(memory_store)
        operator = Operator(TimeTable("t", TIMES, "t"), store=store)
        for epoch in range(100):
            [table] = operator.open()
            table.append(timed([(1, epoch, 0)]))
            operator.checkpoint(epoch - 5)
            assert len(operator.files) <= 6
        assert [call for call in store.calls if call.operation == "read"] == []


@pytest.mark.parametrize(
    "spec",
    [KeyedTable("t", NUMBERS, ("k",)), TimeTable("t", TIMES, "t"), GlobalTable("t", NUMBERS, ("k",))],
    ids=lambda spec: type(spec).__name__,
)
class TestEveryTable:
    def test_has_a_bounded_number_of_files_for_ever(self, spec: TableSpec) -> None:
        operator = Operator(spec)
        for epoch in range(200):
            [table] = operator.open()
            if isinstance(table, KeyedRowsTable):
                table.upsert(numbers(dict.fromkeys(range(epoch % 7 * 3, epoch % 7 * 3 + 40), epoch)))
            else:
                table.append(timed([(key, 1000 + epoch, epoch) for key in range(1 + epoch % 7)]))
            operator.checkpoint(0)
            assert len(operator.files) <= MAX_FILES
        assert len(operator.content()) == (
            58 if isinstance(table, KeyedRowsTable) else sum(1 + e % 7 for e in range(200))
        )

    def test_reads_nothing_before_it_is_asked(self, spec: TableSpec, memory_store: ObjectStorage) -> None:
        store = FaultyStore(memory_store)
        operator = Operator(spec, store=store)
        [table] = operator.open()
        row = {"k": [1], "v": [1], "t": pa.array([1], TIMES.field("t").type)}
        (table.upsert if isinstance(table, KeyedRowsTable) else table.append)(pa.table(row))
        operator.checkpoint()
        operator.open()
        operator.checkpoint()
        assert [call.operation for call in store.calls] == ["create"]


@pytest.mark.parametrize(
    "spec", [KeyedTable("t", NUMBERS, ("k",)), TimeTable("t", TIMES, "t")], ids=lambda spec: type(spec).__name__
)
def test_a_table_keeps_its_content_when_the_parallelism_changes(spec: TableSpec) -> None:
    operator = Operator(spec)
    model: dict[int, int] = {}
    everything: list[tuple[int, int, int]] = []
    for epoch, parallelism in enumerate([1, 4, 2, 3, 1, 16, 3, 5, 1, 4, 2, 3]):
        rows = numbers(dict.fromkeys(range(epoch * 5, epoch * 5 + 40), epoch))
        model |= dict(zip(rows["k"].to_pylist(), rows["v"].to_pylist(), strict=True))
        moments = [(key, key, epoch) for key in range(epoch, epoch + 40)]
        everything += moments
        tables = operator.open(parallelism)
        for table, part in zip(tables, operator.routed(rows, parallelism), strict=True):
            if isinstance(table, KeyedRowsTable):
                table.upsert(part)
        for table, part in zip(tables, operator.routed(timed(moments), parallelism), strict=True):
            if isinstance(table, TimeRowsTable):
                table.append(part)
        operator.checkpoint(-1)
        for table in tables:
            assert len(table.files) <= MAX_FILES
    expected = sorted(model.items(), key=repr) if isinstance(spec, KeyedTable) else content(timed(everything))
    for parallelism in (1, 2, 6):
        assert operator.content(parallelism) == expected


class TestManager:
    def test_an_unknown_table_is_named(self, memory_store: ObjectStorage) -> None:
        scope = Scope(memory_store, ObjectPath("x"), "0", (), None, GROUPS)
        tables = SubtaskTables([KeyedTable("totals", NUMBERS, ("k",))], scope, 0, {}, None)
        with pytest.raises(ConfigurationError, match=r"there is no table 'total'; .* declares totals"):
            tables.table("total")
        with pytest.raises(ConfigurationError, match="declares none"):
            SubtaskTables([], scope, 0, {}, None).table("total")

    def test_tells_which_table_is_dirty_and_discards_all(self, memory_store: ObjectStorage) -> None:
        specs: list[TableSpec] = [KeyedTable("totals", NUMBERS, ("k",)), TimeTable("buffer", TIMES, "t")]
        tables = SubtaskTables(specs, Scope(memory_store, ObjectPath("x"), "0", (), None, GROUPS), 0, {}, None)
        assert tables.dirty is None
        buffer: Any = tables.table("buffer")
        buffer.append(timed([(1, 1, 1)]))
        assert tables.dirty == "buffer"
        tables.discard()
        assert tables.dirty is None
        tables.checkpoint()
        assert [report.files for report in tables.reports()] == [(), ()]
