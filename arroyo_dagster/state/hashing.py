"""Stable, vectorised hashes of Arrow rows: which key group a row belongs to, and a digest of rows in any order.

These decide where state lies, so they must never change: `tests/state` holds their values for every Arrow type.
Values that compare equal hash alike whatever the width, unit or layout of their type, so an integer column may grow
from 32 to 64 bits. Only decimals of different scales and numbers of different kinds do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from arroyo_dagster.errors import ConfigurationError

Lanes: TypeAlias = npt.NDArray[np.uint64]

_NULL = np.uint64(0x9AE16A3B2F90404F)
_GOLDEN = 0x9E3779B97F4A7C15
_POWER = np.uint64(0x100000001B3)
_STEP = np.uint64(0xFF51AFD7ED558CCD)
_MASK = (1 << 64) - 1
_LOW_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
_LONG = 1024


def key_groups(columns: Iterable[pa.Array | pa.ChunkedArray], groups: int) -> npt.NDArray[np.int64]:
    """Tell the key group of each row, from its key columns."""
    high = _rows(columns) >> np.uint64(32)
    return ((high * np.uint64(groups)) >> np.uint64(32)).astype(np.int64)


def subtasks_of(groups: npt.NDArray[np.int64], key_group_count: int, parallelism: int) -> npt.NDArray[np.int64]:
    """Tell which subtask owns each key group."""
    return groups * parallelism // key_group_count


def groups_of(subtask: int, key_group_count: int, parallelism: int) -> tuple[int, int]:
    """The first and the last key group that a subtask owns."""
    first = -(-subtask * key_group_count // parallelism)
    last = -(-(subtask + 1) * key_group_count // parallelism) - 1
    return first, last


def key_hashes(columns: Iterable[pa.Array | pa.ChunkedArray]) -> Lanes:
    """Hash each row of some columns. Different rows may collide; equal ones never differ."""
    return _rows(columns)


def content_digest(rows: pa.RecordBatch | pa.Table) -> int:
    """Sum up a hash of every row, modulo 2^64. The digest of two sets of rows is the sum of their digests."""
    total = np.zeros(rows.num_rows, np.uint64)
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        total += _column(column) * np.uint64(seed)
    return int(_mix(total).sum(dtype=np.uint64))


def canonical(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The column with one zero and one NaN, so that what Arrow groups together is what hashes alike."""
    if not types.is_floating(column.type):
        return column
    kind = pa.float32() if types.is_float16(column.type) else column.type
    values = pc.add(column.cast(kind), pa.scalar(0.0, kind))
    return pc.if_else(pc.is_nan(values), pa.scalar(np.nan, kind), values).cast(column.type)


def digest_text(digest: int) -> str:
    """A digest as it is stored."""
    return f"{digest & _MASK:016x}"


def sum_digests(digests: Iterable[str]) -> str:
    """The digest of all the rows that these are digests of."""
    return digest_text(sum(int(digest, 16) for digest in digests))


def _rows(columns: Iterable[pa.Array | pa.ChunkedArray]) -> Lanes:
    hashes: Lanes | None = None
    for column in columns:
        lanes = _column(column)
        hashes = _mix(lanes if hashes is None else hashes * np.uint64(31) + lanes)
    if hashes is None:
        raise ValueError("a key has at least one column")
    return hashes


def _column(column: pa.Array | pa.ChunkedArray) -> Lanes:
    if not isinstance(column, pa.ChunkedArray):
        return _lanes(column)
    return np.concatenate([np.zeros(0, np.uint64), *map(_lanes, column.chunks)])


def _mix(lanes: Lanes) -> Lanes:
    """One step of splitmix64, which takes nothing likely to zero."""
    mixed = lanes + np.uint64(_GOLDEN)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _lanes(array: pa.Array) -> Lanes:
    """Turn each value into 64 bits: the value itself where it fits, a hash where it does not."""
    lanes = _values(array)
    if array.null_count and not types.is_null(array.type):
        lanes = np.where(array.is_null().to_numpy(zero_copy_only=False), _NULL, lanes)
    return lanes


def _values(array: pa.Array) -> Lanes:
    """The lanes of values that are not null; whatever for the others."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _lanes(array.storage)
    if types.is_null(kind):
        return np.full(len(array), _NULL)
    if types.is_dictionary(kind):
        places = _filled(array.indices.cast(pa.int64()), 0)
        return _lanes(array.dictionary)[places] if len(array.dictionary) else np.full(len(array), _NULL)
    if types.is_run_end_encoded(kind):
        return _lanes(pc.run_end_decode(array))
    if types.is_struct(kind):
        return _rows(array.flatten()) if kind.num_fields else np.zeros(len(array), np.uint64)
    if types.is_decimal(kind) or types.is_interval(kind):
        return _words(array)
    if types.is_floating(kind):
        values = _filled(array.cast(pa.float64()), 0.0) + 0.0  # there is one zero
        return np.where(np.isnan(values), np.nan, values).view(np.uint64)
    if types.is_temporal(kind):
        return _times(array)
    if types.is_boolean(kind) or types.is_integer(kind):
        return _integers(array)
    if types.is_fixed_size_binary(kind):
        return _texts(array.cast(pa.binary()).cast(pa.large_binary()))
    if types.is_string_view(kind):
        return _texts(array.cast(pa.large_string()).cast(pa.large_binary()))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or _is_large_or_view(kind):
        return _texts(array.cast(pa.large_binary()))
    if types.is_nested(kind) and not types.is_union(kind):
        return _lists(array)
    raise ConfigurationError(f"values of type {kind} cannot be hashed")


def _is_large_or_view(kind: pa.DataType) -> bool:
    return bool(types.is_large_binary(kind) or types.is_binary_view(kind))


def _times(array: pa.Array) -> Lanes:
    """Days as they are, all else in microseconds; what nanoseconds have beyond them is put on top."""
    kind = array.type
    if types.is_date(kind):
        return _integers(array.cast(pa.date32(), safe=False).cast(pa.int32()))
    if kind.unit == "ns":
        micros, rest = np.divmod(_filled(array.cast(pa.int64()), 0), 1000)
        return micros.view(np.uint64) + rest.view(np.uint64) * _POWER
    if types.is_timestamp(kind):
        wide = pa.timestamp("us", kind.tz)
    else:
        wide = pa.duration("us") if types.is_duration(kind) else pa.time64("us")
    return _integers(array.cast(wide, safe=False).cast(pa.int64()))


def _integers(array: pa.Array) -> Lanes:
    wide = pa.uint64() if types.is_uint64(array.type) else pa.int64()
    values = _filled(array.cast(wide), 0)
    return values.view(np.uint64)


def _filled(array: pa.Array, value: float) -> npt.NDArray[Any]:
    filled = pc.fill_null(array, pa.scalar(value, array.type)) if array.null_count else array
    values: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return values


def _words(array: pa.Array) -> Lanes:
    """Values of one, two or four 64-bit words, or of one of 32 bits, as they lie in memory.

    A word that only repeats the sign of the one below it adds nothing, so decimals of any width hash alike.
    """
    width = array.type.bit_width // 8
    if width < 8:
        raw = np.frombuffer(array.buffers()[1], np.int32, len(array), array.offset * width)
        return raw.astype(np.int64).view(np.uint64)
    count = width // 8
    words = np.frombuffer(array.buffers()[1], np.int64, len(array) * count, array.offset * width).reshape(-1, count)
    total = words[:, 0].copy().view(np.uint64)
    for place in range(1, count):
        beyond = words[:, place] ^ (words[:, place - 1] >> 63)
        total = total * np.where(beyond, _POWER, np.uint64(1)) + beyond.view(np.uint64) * np.uint64(_GOLDEN)
    return total


def _texts(array: pa.Array) -> Lanes:
    """Hash texts and bytes, eight of them at a time: a round for the first eight of all, one for the next, ..."""
    if not len(array):
        return np.zeros(0, np.uint64)
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    start, size = int(offsets[0]), int(offsets[-1] - offsets[0])
    content = np.zeros(size + 8, np.uint8)  # so that there are eight behind every place
    if size:
        content[:size] = np.frombuffer(array.buffers()[2], np.uint8, size, start)
    words = np.ndarray(size + 1, "<u8", content, strides=(1,))
    starts, lengths = offsets[:-1] - start, np.diff(offsets)
    hashes: Lanes = (lengths.view(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    rows = np.flatnonzero(lengths <= _LONG)
    lanes, at, left = hashes[rows], starts[rows], lengths[rows]
    while len(rows):
        if left.min() <= 0:
            hashes[rows] = lanes
            on = left > 0
            rows, lanes, at, left = rows[on], lanes[on], at[on], left[on]
        lanes ^= words[at] & _LOW_BYTES[np.minimum(left, 8)]
        lanes *= _STEP
        lanes ^= lanes >> np.uint64(32)
        at += 8
        left -= 8
    whole = content.data
    for row in np.flatnonzero(lengths > _LONG).tolist():
        digest = blake2b(whole[starts[row] : starts[row] + lengths[row]], digest_size=8).digest()
        hashes[row] = int.from_bytes(digest, "little")
    return _mix(hashes)


def _lists(array: pa.Array) -> Lanes:
    """Evaluate, for each list, the polynomial that has the hashes of its values as coefficients."""
    kind = array.type
    if types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    lengths = _filled(pc.list_value_length(array).cast(pa.int64()), 0)
    values = _mix(_lanes(array.flatten()))
    ends = np.cumsum(lengths)
    places = np.arange(len(values)) - np.repeat(ends - lengths, lengths)
    powers = np.full(int(lengths.max(initial=0)) + 1, _POWER)
    powers[0] = 1
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum((values + np.uint64(1)) * np.cumprod(powers)[places], out=sums[1:])
    return _mix(sums[ends] - sums[ends - lengths] + lengths.view(np.uint64) * np.uint64(_GOLDEN))
