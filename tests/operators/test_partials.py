"""Partial aggregates come to what DuckDB works out from the raw rows, however these are cut and merged."""

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster.dataflow import agg
from arroyo_dagster.dataflow.agg import Aggregate
from arroyo_dagster.dataflow.graph import EventTime, WindowAggregate
from arroyo_dagster.errors import AttemptError, ConfigurationError
from arroyo_dagster.operators.partials import NO_TIME, Partials

DUCKDB = duckdb.connect(config={"threads": 1})
SECOND = 1_000_000
TIME = pa.timestamp("us", "UTC")

numbers = {"n": agg.count("v"), "s": agg.sum("v"), "m": agg.mean("v"), "d": agg.stddev("v")}
ordered = {"lo": agg.min("v"), "hi": agg.max("v"), "u": agg.count_distinct("v"), "c": agg.count("v"), "r": agg.count()}

# The type of the aggregated column, values for it, and what is worked out.
COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any], dict[str, Aggregate]]] = [
    (pa.int8(), st.integers(-128, 127), numbers | ordered),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1), numbers | ordered),
    (pa.int64(), st.integers(-(2**50), 2**50), numbers | ordered),
    (pa.uint8(), st.integers(0, 255), numbers | ordered),
    (pa.uint64(), st.integers(0, 2**40), numbers | ordered),
    (pa.float32(), st.floats(-1e6, 1e6, width=32), numbers | ordered),
    (pa.float64(), st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0]), numbers | ordered),
    (pa.float64(), st.sampled_from([math.nan, -math.nan, 1.0, -0.0, 0.0, math.inf, -math.inf]), ordered),
    (pa.decimal128(10, 2), st.decimals(-9999, 9999, places=2), numbers | ordered),
    (pa.decimal128(38, 5), st.decimals(-(10**20), 10**20, places=5), numbers | ordered),
    (pa.decimal64(10, 2), st.decimals(-9999, 9999, places=2), numbers | ordered),
    (pa.bool_(), st.booleans(), ordered),
    (pa.string(), st.text("abé☃", max_size=3), ordered),
    (pa.large_string(), st.text("ab", max_size=3), ordered),
    (pa.string_view(), st.text("ab", max_size=20), ordered),
    (pa.dictionary(pa.int8(), pa.string()), st.text("ab", max_size=3), ordered),
    (pa.binary(), st.binary(max_size=3), ordered),
    (pa.date32(), st.dates(date(1900, 1, 1), date(2100, 1, 1)), ordered),
    (pa.timestamp("ms"), st.integers(-(10**12), 10**12), ordered),
    (pa.timestamp("us", "Asia/Tokyo"), st.integers(-(10**15), 10**15), ordered),
    (pa.time64("us"), st.times(), ordered),
]

row = st.tuples(st.sampled_from([1, 2, None]), st.integers(-25 * SECOND, 25 * SECOND))


def spec_of(aggregates: dict[str, Aggregate], keys: Sequence[str] = ("k",), shift: int = 0) -> WindowAggregate:
    return WindowAggregate(tuple(keys), 10 * SECOND, EventTime("t", shift), tuple(aggregates.items()))


def rows_of(rows: list[tuple[int | None, int]], values: list[Any], kind: pa.DataType) -> pa.Table:
    keys, times = [key for key, _ in rows], [at for _, at in rows]
    return pa.table({"k": pa.array(keys, pa.int64()), "t": pa.array(times, TIME), "v": pa.array(values, kind)})


def made(partials: Partials, rows: pa.Table) -> pa.Table:
    return partials.make(rows, partials.times(rows))


def oracle(rows: pa.Table, aggregates: dict[str, Aggregate], kind: pa.DataType) -> list[tuple[Any, ...]]:
    functions = {"mean": "avg({})", "stddev": "stddev_samp({})", "count_distinct": "count(DISTINCT {})"}
    columns = [
        functions.get(aggregate.kind, f"{aggregate.kind}({{}})").format(aggregate.column or "*")
        for aggregate in aggregates.values()
    ]
    query = f"""SELECT k, floor(epoch_us(t) / 10e6)::BIGINT * 10000000 AS start, {", ".join(columns)}
                FROM rows GROUP BY ALL"""
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_decimal64(kind):
        rows = rows.set_column(2, "v", rows["v"].cast(pa.decimal128(10, 2)))
    DUCKDB.register("rows", rows)
    return DUCKDB.execute(query).fetchall()


def comparable(rows: list[tuple[Any, ...]]) -> list[str]:
    def plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        if isinstance(value, bool | int):
            return int(value)
        if isinstance(value, Decimal):
            return value.normalize()
        if isinstance(value, float):
            return "nan" if math.isnan(value) else float(f"{value:.9e}") + 0.0
        return value

    return sorted(repr([plain(value) for value in row]) for row in rows)


def result_of(finished: pa.Table, aggregates: dict[str, Aggregate]) -> list[tuple[Any, ...]]:
    start = finished["window_start"].cast(pa.int64())
    assert finished["window_end"].cast(pa.int64()).to_pylist() == [at + 10 * SECOND for at in start.to_pylist()]
    columns = [finished["k"], start, *(finished[name] for name in aggregates)]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


@pytest.mark.parametrize(("kind", "values", "aggregates"), COLUMNS, ids=[str(kind) for kind, _, _ in COLUMNS])
def test_any_cutting_merged_in_any_order_equals_duckdb(
    kind: pa.DataType, values: st.SearchStrategy[Any], aggregates: dict[str, Aggregate]
) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.tuples(row, values | st.none()), min_size=1, max_size=25), st.data())
    def check(given_rows: list[tuple[tuple[int | None, int], Any]], data: st.DataObject) -> None:
        rows = rows_of([one for one, _ in given_rows], [value for _, value in given_rows], kind)
        partials = Partials.over(spec_of(aggregates), rows.schema)
        cuts = sorted(data.draw(st.lists(st.integers(0, rows.num_rows), max_size=4)))
        bounds = zip([0, *cuts], [*cuts, rows.num_rows], strict=True)
        parts = [
            (partials.spread if data.draw(st.booleans()) else partials.make)(part, partials.times(part))
            for part in (rows.slice(first, last - first) for first, last in bounds)
        ]
        random = Random(data.draw(st.integers(0, 9)))
        while len(parts) > 1:
            random.shuffle(parts)
            parts = [partials.merge(pa.concat_tables(parts[:2])), *parts[2:]]
        parts = [partials.merge(parts[0])]
        assert parts[0].schema == partials.schema
        assert comparable(result_of(partials.finish(parts[0]), aggregates)) == comparable(
            oracle(rows, aggregates, kind)
        )
        # What lies on storage is merged and finished without the rows' schema.
        stored = Partials.stored_as(spec_of(aggregates), partials.schema)
        assert stored.schema == partials.schema
        again = stored.finish(stored.merge(parts[0]))
        assert comparable(result_of(again, aggregates)) == comparable(result_of(partials.finish(parts[0]), aggregates))

    check()


# The type of a key, and values for it, in groups of those that are equal.
KEYS: list[tuple[pa.DataType, list[list[Any]]]] = [
    (pa.int8(), [[1], [2], [None, None]]),
    (pa.uint64(), [[2**64 - 1], [0], [None]]),
    (pa.float64(), [[0.0, -0.0], [math.nan, -math.nan], [1.5, 1.5], [None]]),
    (pa.float32(), [[0.0, -0.0], [math.nan, -math.nan], [None]]),
    (pa.float16(), [[0.0, -0.0], [math.nan, -math.nan], [None]]),
    (pa.bool_(), [[True], [False, False], [None]]),
    (pa.string(), [["a", "a"], [""], [None, None]]),
    (pa.string_view(), [["a", "a"], ["a text that is too long to be inlined"], [None]]),
    (pa.binary(2), [[b"ab", b"ab"], [None]]),
    (pa.dictionary(pa.int8(), pa.string()), [["a", "a"], ["b"], [None, None]]),
    (pa.decimal32(5, 2), [[Decimal("1.50"), Decimal("1.50")], [None]]),
    (pa.decimal256(50, 2), [[Decimal("1.50"), Decimal("1.50")], [None]]),
    (pa.date32(), [[date(1960, 1, 1)], [None]]),
    (pa.time64("us"), [[time(1, 2)], [None]]),
    (pa.duration("ms"), [[5, 5], [None]]),
    (pa.timestamp("us", "Europe/Berlin"), [[5, 5], [None]]),
    (pa.uuid(), [[b"0" * 16, b"0" * 16], [None]]),
    (pa.null(), [[None, None]]),
]


@pytest.mark.parametrize(("kind", "groups"), KEYS, ids=[str(kind) for kind, _ in KEYS])
def test_equal_keys_meet_and_null_is_one_of_them(kind: pa.DataType, groups: list[list[Any]]) -> None:
    values = [value for group in groups for value in group]
    extension = isinstance(kind, pa.BaseExtensionType)
    keys = pa.array(values, kind.storage_type if extension else kind)
    rows = pa.table(
        {"k": pa.ExtensionArray.from_storage(kind, keys) if extension else keys, "t": pa.array([0] * len(values), TIME)}
    )
    partials = Partials.over(spec_of({"n": agg.count()}), rows.schema)
    parts = [made(partials, rows.slice(place, 1)) for place in range(rows.num_rows)]
    alone = partials.spread(rows, partials.times(rows))
    for merged in (made(partials, rows), partials.merge(pa.concat_tables(parts)), partials.merge(alone)):
        assert sorted(partials.finish(merged)["n"].to_pylist()) == sorted(len(group) for group in groups)


class TestTimes:
    @pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
    @pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
    def test_windows_are_aligned_to_1970_in_utc(self, unit: str, zone: str | None) -> None:
        seconds = pa.array([-11, -10, -1, 0, 9, 10], pa.timestamp("s", zone))
        rows = pa.table({"k": [1] * 6, "t": seconds.cast(pa.timestamp(unit, zone))})
        partials = Partials.over(spec_of({"n": agg.count()}), rows.schema)
        result = partials.finish(made(partials, rows))
        assert result.schema.field("window_start").type == pa.timestamp("us", zone)
        starts = [at // SECOND for at in result["window_start"].cast(pa.int64()).to_pylist()]
        assert dict(zip(starts, result["n"].to_pylist(), strict=True)) == {-20: 1, -10: 2, 0: 2, 10: 1}

    def test_a_nanosecond_before_a_window_is_in_the_one_before(self) -> None:
        rows = pa.table({"k": [1, 1], "t": pa.array([-1, 0], pa.timestamp("ns"))})
        partials = Partials.over(spec_of({"n": agg.count()}), rows.schema)
        assert partials.times(rows).tolist() == [-1, 0]
        assert made(partials, rows)["window_start"].cast(pa.int64()).to_pylist() == [-10 * SECOND, 0]

    @pytest.mark.parametrize("shift", [0, -1])
    def test_a_row_without_a_time_is_before_all_others(self, shift: int) -> None:
        rows = pa.table({"k": [1, 1], "t": pa.array([None, 5], TIME)})
        partials = Partials.over(spec_of({"n": agg.count()}, shift=shift), rows.schema)
        assert partials.times(rows).tolist() == [NO_TIME, 5 + shift]

    def test_event_time_that_is_no_timestamp_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="the event time 't' is int64; make it a timestamp"):
            Partials.over(spec_of({"n": agg.count()}), pa.schema([("k", pa.int64()), ("t", pa.int64())]))


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e9, 1e12])
def test_a_standard_deviation_stays_accurate_far_from_zero(offset: float) -> None:
    noise = np.random.default_rng(1).normal(0, 1, 10_000)
    rows = pa.table({"k": [1] * len(noise), "t": pa.array([0] * len(noise), TIME), "v": offset + noise})
    partials = Partials.over(spec_of({"d": agg.stddev("v")}), rows.schema)
    parts = [made(partials, rows.slice(start, 37)) for start in range(0, len(noise), 37)]
    [result] = partials.finish(partials.merge(pa.concat_tables(parts)))["d"].to_pylist()
    assert result == pytest.approx((rows["v"].to_numpy() - offset).std(ddof=1), rel=1e-6)


class TestSums:
    def summed(self, values: list[Any], kind: pa.DataType, parts: int, what: Aggregate | None = None) -> Any:
        rows = pa.table({"k": [1] * len(values), "t": pa.array([0] * len(values), TIME), "v": pa.array(values, kind)})
        partials = Partials.over(spec_of({"s": what or agg.sum("v")}), rows.schema)
        size = -(-len(values) // parts)
        cut = [made(partials, rows.slice(start, size)) for start in range(0, len(values), size)]
        [result] = partials.finish(partials.merge(pa.concat_tables(cut)))["s"].to_pylist()
        return result

    @pytest.mark.parametrize("parts", [1, 2])
    @pytest.mark.parametrize(
        ("values", "kind"),
        [
            ([2**63 - 1, 1], pa.int64()),
            ([-(2**63), -1], pa.int64()),
            ([2**62, 2**62], pa.uint64()),
            ([2**63, 0], pa.uint64()),
            ([Decimal(6 * 10**37), Decimal(6 * 10**37)], pa.decimal128(38, 0)),
            ([Decimal("-9e35"), Decimal("-9e35")], pa.decimal128(38, 2)),
        ],
        ids=str,
    )
    def test_one_that_does_not_fit_is_an_error(self, values: list[Any], kind: pa.DataType, parts: int) -> None:
        with pytest.raises(AttemptError, match="does not fit into"):
            self.summed(values, kind, parts)

    @pytest.mark.parametrize("parts", [1, 2, 4])
    @pytest.mark.parametrize(
        ("values", "kind"),
        [
            ([2**63 - 1, None, 0, -1], pa.int64()),
            ([-(2**63), None, None, 0], pa.int64()),
            ([2**62, 2**62 - 1, -5, 5], pa.int64()),
            ([Decimal(10**38 - 1), None, Decimal(0), Decimal(-1)], pa.decimal128(38, 0)),
        ],
        ids=str,
    )
    def test_one_that_just_fits_is_exact(self, values: list[Any], kind: pa.DataType, parts: int) -> None:
        assert self.summed(values, kind, parts) == sum(int(value) for value in values if value is not None)

    def test_of_nulls_is_null(self) -> None:
        assert self.summed([None, None], pa.int64(), 2) is None

    @pytest.mark.parametrize("what", [agg.mean("v"), agg.stddev("v")], ids=["mean", "stddev"])
    def test_large_integers_have_means_and_deviations(self, what: Aggregate) -> None:
        values = [2**60, 2**60 + 2**40]
        exact = {"mean": 2**60 + 2**39, "stddev": 2**40 / math.sqrt(2)}
        assert self.summed(values, pa.int64(), 2, what) == pytest.approx(exact[what.kind])


def test_the_same_aggregate_may_stand_there_twice() -> None:
    aggregates = {"a": agg.max("v"), "b": agg.max("v"), "c": agg.mean("v"), "d": agg.sum("v"), "e": agg.stddev("v")}
    rows = rows_of([(1, 0), (1, 1)], [1, 3], pa.int32())
    partials = Partials.over(spec_of(aggregates), rows.schema)
    [result] = partials.finish(made(partials, rows)).select(list(aggregates)).to_pylist()
    assert result == {"a": 3, "b": 3, "c": 2.0, "d": 4, "e": pytest.approx(math.sqrt(2))}


def test_partials_of_one_name_are_refused() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", TIME), ("v", pa.int64())])
    with pytest.raises(ConfigurationError, match="named 'a__sum': rename one"):
        Partials.over(spec_of({"a": agg.mean("v"), "a__sum": agg.sum("v")}), schema)


@pytest.mark.parametrize(("aggregates", "keys"), [({"n": agg.sum("w")}, ("k",)), ({"n": agg.count()}, ("w",))])
def test_a_column_that_is_not_there_is_named(aggregates: dict[str, Aggregate], keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="the stream has no column 'w'; it has k, t, v"):
        Partials.over(spec_of(aggregates, keys), pa.schema([("k", pa.int64()), ("t", TIME), ("v", pa.int64())]))


def test_no_rows_make_no_partials() -> None:
    rows = rows_of([], [], pa.int64())
    partials = Partials.over(spec_of(numbers | ordered), rows.schema)
    for nothing in (made(partials, rows), partials.spread(rows, partials.times(rows))):
        assert nothing.schema == partials.schema
        assert partials.finish(partials.merge(nothing)).num_rows == 0
