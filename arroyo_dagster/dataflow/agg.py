"""Aggregates over a window: `agg.count()`, `agg.sum("price")`, ...

Nulls do not count, as in SQL, and NaN is greater than any number. Sums of integers that leave 64 bits, or of decimals
that leave 38 digits, are an error, not a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
from pyarrow import types

from arroyo_dagster.errors import ConfigurationError

__all__ = ["Aggregate", "AggregateKind", "count", "count_distinct", "max", "mean", "min", "stddev", "sum"]


class AggregateKind(StrEnum):
    """What is computed."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    STDDEV = "stddev"
    COUNT_DISTINCT = "count_distinct"


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One aggregate of one column; a count without a column counts rows."""

    kind: AggregateKind
    column: str | None = None

    def result_type(self, column: pa.DataType | None, name: str) -> pa.DataType | None:
        """The type of the result, from that of the column (None: not known yet). `name` is for errors."""
        kind = None if column is None else plain(column)
        match self.kind:
            case AggregateKind.COUNT:
                fits, result = True, pa.int64()
            case AggregateKind.COUNT_DISTINCT:
                fits, result = kind is None or not (types.is_nested(kind) or types.is_null(kind)), pa.int64()
            case AggregateKind.MIN | AggregateKind.MAX:
                fits, result = kind is None or _has_order(kind), kind
            case AggregateKind.SUM:
                fits, result = kind is None or _is_number(kind), _sum_type(kind)
            case AggregateKind.MEAN | AggregateKind.STDDEV:
                fits, result = kind is None or _is_number(kind), pa.float64()
        if not fits:
            raise ConfigurationError(f"{name}: there is no {self.kind} of {self.column!r}, which is {column}")
        return result


def count(column: str | None = None) -> Aggregate:
    """How many rows there are, or, with a column, in how many of them it is not null."""
    return Aggregate(AggregateKind.COUNT, column)


def sum(column: str) -> Aggregate:  # noqa: A001
    """The sum. That of integers is 64 bits wide, that of decimals has 38 digits."""
    return Aggregate(AggregateKind.SUM, column)


def min(column: str) -> Aggregate:  # noqa: A001
    """The least value."""
    return Aggregate(AggregateKind.MIN, column)


def max(column: str) -> Aggregate:  # noqa: A001
    """The greatest value."""
    return Aggregate(AggregateKind.MAX, column)


def mean(column: str) -> Aggregate:
    """The mean, as a float."""
    return Aggregate(AggregateKind.MEAN, column)


def stddev(column: str) -> Aggregate:
    """The standard deviation of a sample; null for a single row."""
    return Aggregate(AggregateKind.STDDEV, column)


def count_distinct(column: str) -> Aggregate:
    """How many different values there are: exact, so all of them are kept until the window closes."""
    return Aggregate(AggregateKind.COUNT_DISTINCT, column)


def plain(kind: pa.DataType) -> pa.DataType:
    """The type in which values of a type are grouped and compared: Arrow cannot do that with all of them."""
    if types.is_dictionary(kind):
        return plain(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if types.is_decimal32(kind) or types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_float16(kind):
        return pa.float32()
    if types.is_string_view(kind):
        return pa.string()
    return pa.binary() if types.is_binary_view(kind) else kind


def _has_order(kind: pa.DataType) -> bool:
    none = types.is_nested(kind) or types.is_null(kind) or types.is_duration(kind) or types.is_interval(kind)
    return not none


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _sum_type(kind: pa.DataType | None) -> pa.DataType | None:
    if kind is None:
        return None
    if types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    return pa.int64() if types.is_integer(kind) else pa.float64()
