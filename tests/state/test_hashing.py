"""Hashes of Arrow rows: they decide where state lies, so they must never change."""

import math
from collections import Counter
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pendulum import naive

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.state.hashing import (
    canonical,
    content_digest,
    digest_text,
    groups_of,
    key_groups,
    key_hashes,
    subtasks_of,
    sum_digests,
)

nan = math.nan

# A type, values of it, and the hash of each.
GOLDEN: list[tuple[pa.DataType, list[Any], str]] = [
    (pa.int8(), [1, -1, None], "910a2dec89025cc1 e4d971771b652c20 f725441d87a5fe5e"),
    (pa.int16(), [1, -1, None], "910a2dec89025cc1 e4d971771b652c20 f725441d87a5fe5e"),
    (pa.int32(), [1, -1, None], "910a2dec89025cc1 e4d971771b652c20 f725441d87a5fe5e"),
    (pa.int64(), [1, -1, None], "910a2dec89025cc1 e4d971771b652c20 f725441d87a5fe5e"),
    (pa.uint8(), [1, 255, None], "910a2dec89025cc1 338c507146283fb4 f725441d87a5fe5e"),
    (pa.uint16(), [1, 255, None], "910a2dec89025cc1 338c507146283fb4 f725441d87a5fe5e"),
    (pa.uint32(), [1, 255, None], "910a2dec89025cc1 338c507146283fb4 f725441d87a5fe5e"),
    (pa.uint64(), [1, 255, 2**64 - 1], "910a2dec89025cc1 338c507146283fb4 e4d971771b652c20"),
    (pa.float16(), [1.5, -0.0, nan, None], "d6dab18e1392608a e220a8397b1dcdaf c72971d82e15bb46 f725441d87a5fe5e"),
    (pa.float32(), [1.5, -0.0, nan, None], "d6dab18e1392608a e220a8397b1dcdaf c72971d82e15bb46 f725441d87a5fe5e"),
    (pa.float64(), [1.5, -0.0, nan, None], "d6dab18e1392608a e220a8397b1dcdaf c72971d82e15bb46 f725441d87a5fe5e"),
    (pa.bool_(), [True, False, None], "910a2dec89025cc1 e220a8397b1dcdaf f725441d87a5fe5e"),
    (
        pa.string(),
        ["", "key", "twelve bytes", "naïve ☃", "long " * 300, None],
        "46b73e79f0c37c00 e483f0337670a5d7 c26f0811280d75e2 87999c153aa4e546 3018120b8c861e6e f725441d87a5fe5e",
    ),
    (
        pa.large_string(),
        ["", "key", "twelve bytes", "naïve ☃", "long " * 300, None],
        "46b73e79f0c37c00 e483f0337670a5d7 c26f0811280d75e2 87999c153aa4e546 3018120b8c861e6e f725441d87a5fe5e",
    ),
    (
        pa.string_view(),
        ["", "key", "twelve bytes", "naïve ☃", "long " * 300, None],
        "46b73e79f0c37c00 e483f0337670a5d7 c26f0811280d75e2 87999c153aa4e546 3018120b8c861e6e f725441d87a5fe5e",
    ),
    (
        pa.binary(),
        [b"", b"key", b"twelve bytes", b"\0", b"\0\0", None],
        "46b73e79f0c37c00 e483f0337670a5d7 c26f0811280d75e2 d4a570152914c353 8c67df0f6a195ddc f725441d87a5fe5e",
    ),
    (
        pa.large_binary(),
        [b"", b"key", b"twelve bytes", b"\0", b"\0\0", None],
        "46b73e79f0c37c00 e483f0337670a5d7 c26f0811280d75e2 d4a570152914c353 8c67df0f6a195ddc f725441d87a5fe5e",
    ),
    (
        pa.binary_view(),
        [b"", b"key", b"twelve bytes", b"\0", b"\0\0", None],
        "46b73e79f0c37c00 e483f0337670a5d7 c26f0811280d75e2 d4a570152914c353 8c67df0f6a195ddc f725441d87a5fe5e",
    ),
    (pa.binary(3), [b"key", None], "e483f0337670a5d7 f725441d87a5fe5e"),
    (
        pa.decimal32(9, 2),
        [Decimal("1.23"), Decimal("-1.23"), None],
        "b4dc9bd462de412b c2dce352d58cf5a3 f725441d87a5fe5e",
    ),
    (
        pa.decimal64(18, 2),
        [Decimal("1.23"), Decimal("-1.23"), None],
        "b4dc9bd462de412b c2dce352d58cf5a3 f725441d87a5fe5e",
    ),
    (
        pa.decimal128(38, 2),
        [Decimal("1.23"), Decimal("-1.23"), Decimal(10**30), None],
        "b4dc9bd462de412b c2dce352d58cf5a3 b98d45305bfc518a f725441d87a5fe5e",
    ),
    (
        pa.decimal256(76, 2),
        [Decimal("1.23"), Decimal("-1.23"), Decimal(10**30), Decimal(10**60), None],
        "b4dc9bd462de412b c2dce352d58cf5a3 b98d45305bfc518a 7b2f7fc23f641c4e f725441d87a5fe5e",
    ),
    (pa.date32(), [date(2026, 11, 18), date(1969, 12, 31), None], "0fe52c759ac10d61 e4d971771b652c20 f725441d87a5fe5e"),
    (pa.date64(), [date(2026, 11, 18), date(1969, 12, 31), None], "0fe52c759ac10d61 e4d971771b652c20 f725441d87a5fe5e"),
    (
        pa.timestamp("s"),
        [naive(2026, 11, 18), naive(1969, 12, 31), None],
        "4daac57d7e4848c4 71a10ee1562bafd4 f725441d87a5fe5e",
    ),
    (
        pa.timestamp("ms"),
        [naive(2026, 11, 18), naive(1969, 12, 31), None],
        "4daac57d7e4848c4 71a10ee1562bafd4 f725441d87a5fe5e",
    ),
    (
        pa.timestamp("us"),
        [naive(2026, 11, 18), naive(1969, 12, 31), None],
        "4daac57d7e4848c4 71a10ee1562bafd4 f725441d87a5fe5e",
    ),
    (
        pa.timestamp("ns"),
        [naive(2026, 11, 18), naive(1969, 12, 31), -1, None],
        "4daac57d7e4848c4 71a10ee1562bafd4 52134a63414495cc f725441d87a5fe5e",
    ),
    (
        pa.timestamp("us", "UTC"),
        [naive(2026, 11, 18), naive(1969, 12, 31), None],
        "4daac57d7e4848c4 71a10ee1562bafd4 f725441d87a5fe5e",
    ),
    (pa.timestamp("s", "Asia/Tokyo"), [datetime(2026, 11, 18, tzinfo=UTC), None], "4daac57d7e4848c4 f725441d87a5fe5e"),
    (pa.time32("s"), [time(12, 30), None], "5a8f0d2b5a36e145 f725441d87a5fe5e"),
    (pa.time32("ms"), [time(12, 30), None], "5a8f0d2b5a36e145 f725441d87a5fe5e"),
    (pa.time64("us"), [time(12, 30), time(12, 30, 0, 1), None], "5a8f0d2b5a36e145 e201ecec3a119558 f725441d87a5fe5e"),
    (
        pa.time64("ns"),
        [time(12, 30), time(12, 30, 0, 1), 1, None],
        "5a8f0d2b5a36e145 e201ecec3a119558 7fee3b89592d13a8 f725441d87a5fe5e",
    ),
    (pa.duration("s"), [timedelta(hours=-1), None], "7a4d99882e54c068 f725441d87a5fe5e"),
    (pa.duration("ms"), [timedelta(hours=-1), None], "7a4d99882e54c068 f725441d87a5fe5e"),
    (pa.duration("us"), [timedelta(hours=-1), None], "7a4d99882e54c068 f725441d87a5fe5e"),
    (pa.duration("ns"), [timedelta(hours=-1), 1, None], "7a4d99882e54c068 7fee3b89592d13a8 f725441d87a5fe5e"),
    (pa.month_day_nano_interval(), [(1, 2, 3), (-1, 0, 0), None], "81b3e8f861f93d9f 73b13ba2aff181c0 f725441d87a5fe5e"),
    (
        pa.dictionary(pa.int8(), pa.string()),
        ["key", "twelve bytes", "key", None],
        "e483f0337670a5d7 c26f0811280d75e2 e483f0337670a5d7 f725441d87a5fe5e",
    ),
    (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        [{"a": 1, "b": "key"}, {"a": None, "b": None}, None],
        "9e29ff8b8880a465 ffd9fb4c8e87d0c8 f725441d87a5fe5e",
    ),
    (pa.struct([]), [{}, None], "e220a8397b1dcdaf f725441d87a5fe5e"),
    (
        pa.list_(pa.int32()),
        [[], [1], [1, 2], [2, 1], [None], None],
        "a706dd2f4d197e6f 3760a16f01b36657 aebce3d211d6d455 1faaec6b99a46f84 877c2591ae56d5c2 f725441d87a5fe5e",
    ),
    (
        pa.large_list(pa.int32()),
        [[], [1], [1, 2], [2, 1], [None], None],
        "a706dd2f4d197e6f 3760a16f01b36657 aebce3d211d6d455 1faaec6b99a46f84 877c2591ae56d5c2 f725441d87a5fe5e",
    ),
    (
        pa.list_view(pa.int32()),
        [[], [1], [1, 2], [2, 1], [None], None],
        "a706dd2f4d197e6f 3760a16f01b36657 aebce3d211d6d455 1faaec6b99a46f84 877c2591ae56d5c2 f725441d87a5fe5e",
    ),
    (
        pa.large_list_view(pa.int32()),
        [[], [1], [1, 2], [2, 1], [None], None],
        "a706dd2f4d197e6f 3760a16f01b36657 aebce3d211d6d455 1faaec6b99a46f84 877c2591ae56d5c2 f725441d87a5fe5e",
    ),
    (pa.list_(pa.int32(), 2), [[1, 2], [2, 1], None], "aebce3d211d6d455 1faaec6b99a46f84 f725441d87a5fe5e"),
    (
        pa.list_(pa.list_(pa.string())),
        [[["key"], []], [[], ["key"]], None],
        "c1f138923c8860cc cf83c42909c964e8 f725441d87a5fe5e",
    ),
    (
        pa.map_(pa.string(), pa.int32()),
        [[], [("key", 1)], [("a", 1), ("b", None)], None],
        "a706dd2f4d197e6f 36b33f95817a0e0a 624092f13b4faf7c f725441d87a5fe5e",
    ),
    (pa.null(), [None], "f725441d87a5fe5e"),
    (pa.uuid(), [UUID(int=1).bytes, None], "1e93e078ee0c1b0a f725441d87a5fe5e"),
    (pa.json_(), ['{"a": 1}', None], "8f1c8c1604347d7e f725441d87a5fe5e"),
    (pa.bool8(), [1, 0, None], "910a2dec89025cc1 e220a8397b1dcdaf f725441d87a5fe5e"),
    (
        pa.run_end_encoded(pa.int32(), pa.int64()),
        [1, 1, -1, None],
        "910a2dec89025cc1 910a2dec89025cc1 e4d971771b652c20 f725441d87a5fe5e",
    ),
]

by_type = pytest.mark.parametrize(("kind", "values", "golden"), GOLDEN, ids=lambda case: str(case)[:40])


def array_of(kind: pa.DataType, values: list[Any]) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(kind.storage_type, values))
    if pa.types.is_run_end_encoded(kind):
        return pc.run_end_encode(pa.array(values, kind.value_type))
    return pa.array(values, kind)


def hashes(*columns: pa.Array | pa.ChunkedArray) -> list[str]:
    return [f"{value:016x}" for value in key_hashes(columns)]


class TestGolden:
    """These values never change."""

    @by_type
    def test_every_type(self, kind: pa.DataType, values: list[Any], golden: str) -> None:
        assert hashes(array_of(kind, values)) == golden.split()

    @by_type
    def test_slices_hash_like_the_whole(self, kind: pa.DataType, values: list[Any], golden: str) -> None:
        array = array_of(kind, [*values, *values])
        for start in range(len(values) + 1):
            assert hashes(array.slice(start, len(values))) == (golden.split() * 2)[start : start + len(values)]

    @by_type
    def test_chunks_hash_like_the_whole(self, kind: pa.DataType, values: list[Any], golden: str) -> None:
        whole, empty = array_of(kind, values), array_of(kind, values).slice(0, 0)
        assert hashes(pa.chunked_array([empty, whole, whole.slice(1), empty])) == golden.split() + golden.split()[1:]
        assert hashes(pa.chunked_array([], type=kind)) == []

    @by_type
    def test_different_values_hash_differently(self, kind: pa.DataType, values: list[Any], golden: str) -> None:
        assert len(set(golden.split())) == len({repr(value) for value in values})

    def test_keys_of_several_columns(self) -> None:
        numbers, names = pa.array([1, 2, None, None]), pa.array(["a", None, "a", None])
        assert " ".join(hashes(numbers, names)) == "c6abec92e4ea076c 7f1076ce638983e9 b375ed26a2096567 5781d54287713aca"
        assert len({*hashes(numbers, names), *hashes(names, numbers)}) == 7  # two nulls look alike from both sides

    def test_digests(self) -> None:
        table = pa.table({"n": [1, None, 3], "t": ["a", "b", None]})
        assert digest_text(content_digest(table)) == "5a4bef6dbe6a667e"
        assert content_digest(table.slice(0, 0)) == 0

    def test_key_groups(self) -> None:
        assert key_groups([pa.array(range(12))], 128).tolist() == [113, 72, 75, 14, 55, 49, 94, 49, 79, 87, 4, 40]


def test_a_union_is_refused() -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    with pytest.raises(ConfigurationError, match="values of type dense_union<0: int64=0> cannot be hashed"):
        key_hashes([union])


def test_a_key_of_no_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one column"):
        key_hashes([])


class TestEqualValuesHashAlike:
    @given(st.lists(st.integers(-128, 127) | st.none(), min_size=1))
    def test_integers_of_any_width(self, values: list[int | None]) -> None:
        kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
        assert len({tuple(hashes(pa.array(values, kind))) for kind in kinds}) == 1

    @given(st.lists(st.integers(0, 127) | st.none(), min_size=1))
    def test_unsigned_and_signed(self, values: list[int | None]) -> None:
        kinds = [pa.int8(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.int64()]
        assert len({tuple(hashes(pa.array(values, kind))) for kind in kinds}) == 1

    @given(st.lists(st.text() | st.none(), min_size=1))
    def test_texts_of_any_layout(self, values: list[str | None]) -> None:
        layouts = [pa.array(values, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
        layouts += [layouts[0].cast(pa.binary()), layouts[0].dictionary_encode()]
        assert len({tuple(hashes(layout)) for layout in layouts}) == 1

    @given(st.lists(st.decimals(-99999, 99999, places=2) | st.none(), min_size=1))
    def test_decimals_of_any_width(self, values: list[Decimal | None]) -> None:
        kinds = [pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal128(20, 2), pa.decimal256(50, 2)]
        assert len({tuple(hashes(pa.array(values, kind))) for kind in kinds}) == 1

    @given(st.lists(st.floats(width=16) | st.none(), min_size=1))
    def test_floats_of_any_width(self, values: list[float | None]) -> None:
        kinds = [pa.float16(), pa.float32(), pa.float64()]
        assert len({tuple(hashes(pa.array(values, kind))) for kind in kinds}) == 1

    @given(st.lists(st.integers(-(2**62), 2**62) | st.none(), min_size=1))
    def test_times_of_any_zone(self, values: list[int | None]) -> None:
        zones = [None, "UTC", "Asia/Tokyo"]
        assert len({tuple(hashes(pa.array(values, pa.timestamp("us", zone)))) for zone in zones}) == 1

    @given(st.lists(st.integers(-(2**31), 2**31) | st.none(), min_size=1))
    def test_times_of_any_unit(self, values: list[int | None]) -> None:
        seconds = pa.array(values, pa.timestamp("s"))
        assert len({tuple(hashes(seconds.cast(pa.timestamp(unit)))) for unit in ("s", "ms", "us", "ns")}) == 1

    def test_zeros_and_nans(self) -> None:
        odd_nan = np.array([0xFFF8000000000001], np.uint64).view(np.float64)[0]
        assert len(set(hashes(pa.array([0.0, -0.0])))) == 1
        assert len(set(hashes(pa.array([math.nan, -math.nan, odd_nan])))) == 1

    @pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
    def test_canonical_floats_group_as_they_hash(self, kind: pa.DataType) -> None:
        column = pa.array(np.array([0.0, -0.0, math.nan, -math.nan, 1.0]), pa.float64()).cast(kind)
        assert len(pa.table({"k": canonical(column)}).group_by("k").aggregate([])) == len(set(hashes(column))) == 3

    def test_a_dictionary_with_nulls_and_unused_values(self) -> None:
        values = pa.array(["unused", "b", None])
        encoded = pa.DictionaryArray.from_arrays(pa.array([1, None, 2, 1], pa.int8()), values)
        assert hashes(encoded) == hashes(pa.array(["b", None, None, "b"]))
        nothing = pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), pa.array([], pa.string()))
        assert hashes(nothing) == hashes(pa.array([None], pa.string()))

    def test_what_lies_behind_a_null_does_not_count(self) -> None:
        texts = pa.array(["hidden", "b"])
        mask = pa.py_buffer(bytes([0b10]))
        hidden = pa.Array.from_buffers(pa.string(), 2, [mask, *texts.buffers()[1:]])
        assert hashes(hidden) == hashes(pa.array([None, "b"]))
        row = pa.StructArray.from_arrays([pa.array([1, 2])], ["a"], mask=pa.array([True, False]))
        assert hashes(row) == hashes(pa.array([None, {"a": 2}]))


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), unique=True))
def test_different_texts_hash_differently(texts: list[str]) -> None:
    assert len(set(hashes(pa.array(texts, pa.string())))) == len(texts)


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 1023, 1024, 1025, 5000])
def test_every_byte_of_a_text_counts(length: int) -> None:
    plain = b"x" * length
    changed = [plain[:at] + b"y" + plain[at + 1 :] for at in range(length)]
    assert len(set(hashes(pa.array([plain, plain + b"\0", plain[:-1], *changed])))) == length + 3


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(range(100_000)),
        pa.array(range(0, 100_000 << 10, 1 << 10)),
        pa.array([float(number) for number in range(100_000)]),
        pa.array([f"key{number}" for number in range(100_000)]),
        pa.array([f"{number:012d}" for number in range(100_000)]),
        pa.array(range(100_000), pa.timestamp("s")),
        pa.array([[number] for number in range(100_000)]),
    ],
    ids=["integers", "multiples", "floats", "texts", "long texts", "times", "lists"],
)
def test_keys_spread_evenly_over_the_groups(keys: pa.Array) -> None:
    sizes = np.bincount(key_groups([keys], 128), minlength=128)
    expected = len(keys) / 128
    assert (
        (sizes - expected) ** 2 / expected
    ).sum() < 220  # of a chi-squared with 127 degrees, one in a million is more


def test_groups_and_subtasks_agree() -> None:
    for count in range(1, 131):
        for parallelism in range(1, count + 1):
            owners = subtasks_of(np.arange(count), count, parallelism).tolist()
            ranges = [groups_of(subtask, count, parallelism) for subtask in range(parallelism)]
            assert owners == [subtask for subtask, (first, last) in enumerate(ranges) for _ in range(first, last + 1)]
            sizes = Counter(owners).values()
            assert len(sizes) == parallelism
            assert max(sizes) - min(sizes) <= 1


rows = st.lists(st.tuples(st.integers(-3, 3) | st.none(), st.text("ab", max_size=2) | st.none()), max_size=12)


def table_of(values: list[tuple[int | None, str | None]]) -> pa.Table:
    return pa.table(
        {"n": pa.array([n for n, _ in values], pa.int64()), "t": pa.array([t for _, t in values], pa.string())}
    )


class TestContentDigest:
    @given(rows, st.randoms())
    def test_order_of_rows_does_not_matter(self, values: list[Any], random: Any) -> None:
        shuffled = random.sample(values, len(values))
        assert content_digest(table_of(shuffled)) == content_digest(table_of(values))

    @given(rows, rows)
    def test_is_additive_and_does_not_see_chunks(self, one: list[Any], other: list[Any]) -> None:
        parts = [table_of(one), table_of(other)]
        both = digest_text(content_digest(pa.concat_tables(parts)))
        assert both == digest_text(content_digest(table_of(one + other)))
        assert both == sum_digests(digest_text(content_digest(part)) for part in parts)

    @given(rows)
    def test_order_of_columns_does_not_matter_but_their_names_do(self, values: list[Any]) -> None:
        table = table_of(values)
        assert content_digest(table.select(["t", "n"])) == content_digest(table)
        if values:
            assert content_digest(table.rename_columns(["n", "u"])) != content_digest(table)

    @given(rows, rows)
    def test_different_rows_have_different_digests(self, one: list[Any], other: list[Any]) -> None:
        same = Counter(one) == Counter(other)
        assert (content_digest(table_of(one)) == content_digest(table_of(other))) is same

    @pytest.mark.parametrize("value", [0, None], ids=str)
    def test_rows_of_nothing_but_zero_or_null_count(self, value: int | None) -> None:
        digests = {content_digest(pa.table({"n": pa.array([value] * count, pa.int64())})) for count in range(5)}
        assert len(digests) == 5

    def test_sees_a_single_nanosecond(self) -> None:
        one, other = (pa.table({"t": pa.array([value], pa.timestamp("ns"))}) for value in (1, 2))
        assert content_digest(one) != content_digest(other)
