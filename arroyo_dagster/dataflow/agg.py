"""Aggregates over a window: `agg.count()`, `agg.sum("price")`, ...

Nulls do not count, as in SQL. Integer sums that leave 64 bits are an error, not a wrong number.
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
        match self.kind:
            case AggregateKind.COUNT | AggregateKind.COUNT_DISTINCT:
                fits, result = column is None or not types.is_nested(column), pa.int64()
            case AggregateKind.MIN | AggregateKind.MAX:
                fits, result = column is None or not types.is_nested(column), column
            case AggregateKind.SUM:
                fits, result = column is None or _is_number(column), _sum_type(column)
            case AggregateKind.MEAN | AggregateKind.STDDEV:
                fits, result = column is None or _is_number(column), pa.float64()
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


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _sum_type(kind: pa.DataType | None) -> pa.DataType | None:
    if kind is None:
        return None
    if types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    return pa.int64() if types.is_integer(kind) else pa.float64()
