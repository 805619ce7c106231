"""State tables as an operator declares them, and as it uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa
from pyarrow import types

from arroyo_dagster.dataflow.duration import DurationLike, microseconds
from arroyo_dagster.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Rows with a time, kept until the watermark has passed it by `retention`: window partials, join buffers.

    A checkpoint appends what is new. `combine`, if there is one, may shrink rows that lie together, as a partial
    aggregate does; it must not matter how often it is called, and on which parts.
    """

    name: str
    schema: pa.Schema
    time: str
    retention: DurationLike = "0 seconds"
    combine: Callable[[pa.Table], pa.Table] | None = None

    def __post_init__(self) -> None:
        _check(self.name, self.schema, (self.time,), "time")
        if not types.is_timestamp(self.schema.field(self.time).type):
            kind = self.schema.field(self.time).type
            raise ConfigurationError(f"table {self.name!r}: the time column {self.time!r} is {kind}, not a timestamp")
        microseconds(self.retention, f"table {self.name!r}: its retention")


@dataclass(frozen=True, slots=True)
class KeyedTable:
    """One row a key, of which the newest wins: totals, last values, keys seen before.

    Under a keyed operator, `key` must contain the columns that the stream is keyed by.
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_key(self.name, self.schema, self.key)


@dataclass(frozen=True, slots=True)
class GlobalTable:
    """A small table, one row a key, that every subtask sees whole.

    What a subtask writes, the others see from the next epoch on. When several write the same key in one epoch, the
    one with the highest index wins.
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_key(self.name, self.schema, self.key)


TableSpec: TypeAlias = TimeTable | KeyedTable | GlobalTable


def _check_key(name: str, schema: pa.Schema, key: tuple[str, ...]) -> None:
    _check(name, schema, key, "key")
    for column in {"_deleted", "found"} & set(schema.names):
        raise ConfigurationError(f"table {name!r} has a column {column!r}, a name that it needs for itself: rename it")
    for column in key:
        kind = schema.field(column).type
        if _is_compound(kind) or types.is_null(kind) or types.is_float16(kind) or types.is_dictionary(kind):
            raise ConfigurationError(f"table {name!r}: the column {column!r} is {kind}, which cannot be a key")


def _check(name: str, schema: pa.Schema, columns: tuple[str, ...], role: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the table name {name!r} is not usable: take ASCII letters, digits and underscores, first a letter"
        )
    if not isinstance(schema, pa.Schema):
        raise ConfigurationError(f"table {name!r}: its schema must be a pyarrow.Schema, not {schema!r}")
    if not isinstance(columns, tuple) or not columns:
        raise ConfigurationError(f"table {name!r}: its {role} must be a tuple of at least one column, not {columns!r}")
    for column in columns:
        if column not in schema.names:
            raise ConfigurationError(f"table {name!r} has no column {column!r}; it has {', '.join(schema.names)}")
    if len(set(schema.names)) < len(schema.names):
        raise ConfigurationError(f"table {name!r} has two columns of one name: {', '.join(schema.names)}")
    for field in schema:
        if _has_no_file(field.type):
            raise ConfigurationError(
                f"table {name!r}: the column {field.name!r} is {field.type}, which state tables cannot hold"
            )


def _is_compound(kind: pa.DataType) -> bool:
    return bool(types.is_nested(kind)) or isinstance(kind, pa.BaseExtensionType)


def _has_no_file(kind: pa.DataType) -> bool:
    view = types.is_string_view(kind) or types.is_binary_view(kind)
    return bool(view or types.is_interval(kind) or types.is_run_end_encoded(kind) or types.is_union(kind))


class TimeRows(Protocol):
    """A `TimeTable` in use, in one subtask. Times are microseconds since 1970."""

    def append(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows. Those that the watermark has left behind already are not kept, and show in the metrics."""

    def scan(self, start: int | None = None, end: int | None = None) -> pa.Table:
        """Return the rows with `start <= time < end`. Only the files that can have some are read."""


class KeyedRows(Protocol):
    """A `KeyedTable` or `GlobalTable` in use, in one subtask."""

    def get(self, keys: pa.RecordBatch | pa.Table) -> pa.Table:
        """Look keys up: one row for each, in their order, with nulls beside a key that is not there.

        The column `found` at the end tells whether it is.
        """

    def upsert(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Insert rows, or replace those with the same key. Of several with one key, the last one counts."""

    def delete(self, keys: pa.RecordBatch | pa.Table) -> None:
        """Delete by key. It is no error if there is nothing."""

    def scan(self) -> pa.Table:
        """Return all rows."""
