"""Arrow's types and Delta's: what can be kept, what has to change for it, and what has no place there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from arroyo_dagster.errors import ConfigurationError

_WIDER = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.float16(): pa.float32()}
_SAME = frozenset(
    {pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()}
    | {pa.date32(), pa.string(), pa.binary()}
)
_UNUSABLE_IN_NAMES = frozenset(" ,;{}()\n\t=")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def delta_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows in types that Delta has, with no value changed. What cannot be kept is refused."""
    schema = delta_schema(batch.schema)
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"the column {field.name!r} has values of type {batch.schema.field(field.name).type} that Delta's "
                f"{field.type} cannot hold: cast it before the sink ({str(error).splitlines()[0]})"
            ) from error
    return pa.record_batch(columns, schema=schema)


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The types that a Delta table keeps these columns in."""
    seen: set[str] = set()
    for name in schema.names:
        if name.lower() in seen:
            raise ConfigurationError(f"the column {name!r} comes twice, and Delta does not tell A from a: rename one")
        if not name or _UNUSABLE_IN_NAMES & set(name):
            raise ConfigurationError(f"the column {name!r} has a name that Delta refuses: rename it before the sink")
        seen.add(name.lower())
    return pa.schema([pa.field(field.name, _kept(field.type, field.name)) for field in schema])


def new_columns(table: Any, wanted: Any) -> list[Any]:
    """The fields that `table`, a Delta schema, lacks of those that are `wanted`; a conflict is refused."""
    known = {field.name.lower(): field for field in table.fields}
    added = []
    for field in wanted.fields:
        existing = known.pop(field.name.lower(), None)
        if existing is None:
            added.append(field)
        elif _text(existing.type) != _text(field.type):
            raise ConfigurationError(
                f"the column {field.name!r} is {_text(existing.type)} in the Delta table and {_text(field.type)} in "
                "the pipeline: cast it before the sink, or take another table"
            )
        elif existing.name != field.name:
            raise ConfigurationError(
                f"the column {field.name!r} is named {existing.name!r} in the Delta table: rename it before the sink"
            )
    for left in known.values():
        if not left.nullable:
            raise ConfigurationError(
                f"the Delta table wants a value for {left.name!r}, which the pipeline lacks: add it"
            )
    return added


def statistics(metadata: pq.FileMetaData) -> str:
    """What readers may know of a file without opening it.

    Only where Delta's order is certainly that of Parquet: no floats (not a number), no text (cut off).
    """
    found: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for index, field in enumerate(_plain_columns(metadata)):
        if field is None:
            continue
        chunks = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if all(chunk is not None and chunk.has_null_count for chunk in chunks):
            found["nullCount"][field.name] = sum(chunk.null_count for chunk in chunks)
        ranges = [chunk for chunk in chunks if chunk is not None and chunk.has_min_max]
        if len(ranges) == len(chunks) and ranges:
            bounds = _bounds(field.type, min(one.min_raw for one in ranges), max(one.max_raw for one in ranges))
            if bounds:
                found["minValues"][field.name], found["maxValues"][field.name] = bounds
    return json.dumps({"numRecords": metadata.num_rows, **found})


def _kept(kind: pa.DataType, column: str) -> pa.DataType:
    if kind in _SAME:
        return kind
    if kind in _WIDER:
        return _WIDER[kind]
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_date(kind):
        return pa.date32()
    if types.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_dictionary(kind):
        return _kept(kind.value_type, column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_kept(kind.value_type, column))
    if types.is_map(kind):
        return pa.map_(_kept(kind.key_type, column), _kept(kind.item_type, column))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _kept(field.type, f"{column}.{field.name}")) for field in kind])
    raise ConfigurationError(f"the column {column!r} is {kind}, which Delta does not have: cast it before the sink")


def _plain_columns(metadata: pq.FileMetaData) -> Iterable[pa.Field | None]:
    """The field of each Parquet column, or None if it is a part of a nested one."""
    fields = {field.name: field for field in metadata.schema.to_arrow_schema() if not types.is_nested(field.type)}
    for index in range(metadata.num_columns):
        yield fields.get(metadata.schema.column(index).path)


def _bounds(kind: pa.DataType, low: int, high: int) -> tuple[Any, Any] | None:
    try:
        if types.is_signed_integer(kind):
            return low, high
        if types.is_date32(kind):
            return str(date(1970, 1, 1) + timedelta(low)), str(date(1970, 1, 1) + timedelta(high))
        if types.is_timestamp(kind):
            # Some readers know milliseconds only, so the range is widened to these.
            zone = "" if kind.tz is None else "Z"
            return _moment(low // 1000) + zone, _moment(-(-high // 1000)) + zone
    except OverflowError:
        return None  # a year that no date in Python has
    return None


def _moment(millis: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=millis)
    return moment.replace(tzinfo=None).isoformat(timespec="milliseconds")


def _text(kind: Any) -> str:
    text: str = kind.to_json().strip('"')
    return text.replace('"nullable":false', '"nullable":true').replace('Null":false', 'Null":true')
