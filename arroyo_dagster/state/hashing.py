"""Stable, vectorised hashes of Arrow rows: which key group a row belongs to, and a digest of rows in any order.

These decide where state lies, so they must never change: `tests/state` holds their values for every Arrow type.
Values that compare equal hash alike whatever their width, so an integer column may grow from 32 to 64 bits.
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
_MASK = (1 << 64) - 1
_BYTES_AT_ONCE = 1 << 24


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
        total += _lanes(_whole(column)) * np.uint64(seed)
    return int(_mix(total).sum(dtype=np.uint64))


def digest_text(digest: int) -> str:
    """A digest as it is stored."""
    return f"{digest & _MASK:016x}"


def sum_digests(digests: Iterable[str]) -> str:
    """The digest of all the rows that these are digests of."""
    return digest_text(sum(int(digest, 16) for digest in digests))


def _rows(columns: Iterable[pa.Array | pa.ChunkedArray]) -> Lanes:
    hashes: Lanes | None = None
    for column in columns:
        lanes = _lanes(_whole(column))
        hashes = _mix(lanes if hashes is None else hashes * np.uint64(31) + lanes)
    if hashes is None:
        raise ValueError("a key has at least one column")
    return hashes


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _mix(lanes: Lanes) -> Lanes:
    """The finaliser of splitmix64."""
    mixed = lanes ^ (lanes >> np.uint64(30))
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
    kind = array.type
    if isinstance(kind, pa.ExtensionType | pa.BaseExtensionType):
        return _lanes(array.storage)
    if types.is_null(kind):
        return np.full(len(array), _NULL)
    if types.is_dictionary(kind):
        return _lanes(array.dictionary_decode())
    if types.is_struct(kind):
        return _rows(array.flatten()) if kind.num_fields else np.zeros(len(array), np.uint64)
    if types.is_nested(kind):
        return _nested(array)
    if types.is_decimal(kind) or types.is_interval(kind):
        return _words(array)
    if types.is_floating(kind):
        values = _filled(array.cast(pa.float64()), 0.0) + 0.0  # there is one zero
        return np.where(np.isnan(values), np.nan, values).view(np.uint64)
    if types.is_temporal(kind):
        return _integers(array.cast(_MICROSECONDS(kind), safe=False).cast(pa.int64()))
    if types.is_boolean(kind) or types.is_integer(kind):
        return _integers(array)
    if types.is_fixed_size_binary(kind):
        return _texts(array.cast(pa.binary()).cast(pa.large_binary()))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _texts(array.cast(pa.large_string() if types.is_string_view(kind) else pa.large_binary()))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return _texts(array.cast(pa.large_binary()))
    raise ConfigurationError(f"values of type {kind} cannot be hashed")


def _MICROSECONDS(kind: pa.DataType) -> pa.DataType:  # noqa: N802 - it stands for a type
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_time(kind):
        return pa.time64("us")
    if types.is_duration(kind):
        return pa.duration("us")
    return pa.int32() if types.is_date32(kind) else pa.date64()


def _integers(array: pa.Array) -> Lanes:
    wide = pa.uint64() if types.is_uint64(array.type) else pa.int64()
    values = _filled(array.cast(wide), 0)
    return values.view(np.uint64)


def _filled(array: pa.Array, value: float) -> npt.NDArray[Any]:
    filled = pc.fill_null(array, pa.scalar(value, array.type)) if array.null_count else array
    values: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return values


def _words(array: pa.Array) -> Lanes:
    """Values of a fixed number of 64-bit words (or one of 32 bits), as they lie in memory."""
    width = array.type.bit_width // 8
    if width < 8:
        raw = np.frombuffer(array.buffers()[1], np.int32, len(array), array.offset * width)
        return raw.astype(np.int64).view(np.uint64)
    count = width // 8
    words = np.frombuffer(array.buffers()[1], np.uint64, len(array) * count, array.offset * width)
    lanes = words.reshape(-1, count)
    total = lanes[:, 0].copy()
    for place in range(1, count):
        total = total * np.uint64(31) + lanes[:, place]
    return total


def _texts(array: pa.Array) -> Lanes:
    if not len(array):
        return np.zeros(0, np.uint64)
    offsets = np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, array.offset * 8)
    if offsets[-1] - offsets[0] > _BYTES_AT_ONCE and len(array) > 1:
        middle = len(array) // 2
        return np.concatenate([_texts(array.slice(0, middle)), _texts(array.slice(middle))])
    size = int(offsets[-1] - offsets[0])
    content = array.buffers()[2]
    values = np.frombuffer(content, np.uint8, size, int(offsets[0])) if size else np.zeros(0, np.uint8)
    return _polynomials(values.astype(np.uint64), offsets - offsets[0])


def _nested(array: pa.Array) -> Lanes:
    kind = array.type
    if types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    elif not types.is_list(kind) and not types.is_large_list(kind):
        array = array.cast(pa.large_list(kind.value_type))
    lengths = _filled(pc.list_value_length(array).cast(pa.int64()), 0)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return _polynomials(_mix(_lanes(array.flatten())), offsets)


def _polynomials(values: Lanes, offsets: npt.NDArray[np.int64]) -> Lanes:
    """Evaluate, for each range of values, the polynomial that has them as coefficients."""
    lengths = np.diff(offsets)
    places = np.arange(len(values)) - np.repeat(offsets[:-1], lengths)
    powers = np.full(int(lengths.max(initial=0)) + 1, _POWER)
    powers[0] = 1
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum((values + np.uint64(1)) * np.cumprod(powers)[places], out=sums[1:])
    return _mix(sums[offsets[1:]] - sums[offsets[:-1]] + lengths.astype(np.uint64) * np.uint64(_GOLDEN))
