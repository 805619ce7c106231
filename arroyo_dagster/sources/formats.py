"""Parquet, JSON lines and CSV as batches of one schema, whatever a file's own columns are."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Literal, TypeAlias, get_args

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json
import pyarrow.parquet as pq

Format: TypeAlias = Literal["parquet", "json", "csv"]

FORMATS: tuple[str, ...] = get_args(Format)
PATTERNS = {
    "parquet": ("*.parquet",),
    "json": tuple(f"*.{ending}{packed}" for ending in ("json", "jsonl", "ndjson") for packed in ("", ".gz")),
    "csv": ("*.csv", "*.csv.gz"),
}

_ROWS_PER_BATCH = 1 << 18
_PIECE_BYTES = 1 << 24
_CSV_BLOCK_BYTES = 1 << 26  # a line cannot be longer
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_NEWLINE = re.compile(rb"\n")
_LEADING_NULL = re.compile(rb"((?:\xef\xbb\xbf)?\s*)null")


class UnreadableFileError(Exception):
    """A file's bytes are not what its format and the schema promise. The message says why."""


def read_batches(
    format: Format,  # noqa: A002
    name: str,
    data: pa.Buffer,
    schema: pa.Schema,
    columns: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Read `columns` of a file, matched by name and cast to `schema`; columns that the file lacks are null.

    Raises `UnreadableFileError`, possibly after the first batches.
    """
    fields = [schema.field(column) for column in columns]
    with _unreadable():
        if format == "parquet":
            batches = _parquet_batches(data, schema, fields)
        elif format == "json":
            batches = _json_batches(_decompressed(name, data), fields)
        else:
            batches = _csv_batches(_decompressed(name, data), schema, fields)
        for batch in batches:
            yield _conformed(batch, fields)


def parquet_schema(data: pa.Buffer) -> pa.Schema:
    """The schema that a Parquet file gives its rows. Raises `UnreadableFileError`."""
    with _unreadable():
        schema = pq.read_schema(pa.BufferReader(data))
    return pa.schema([pa.field(field.name, _plain(field.type), field.nullable) for field in schema])


def unreadable_types(format: Format, schema: pa.Schema) -> list[str]:  # noqa: A002
    """The fields that this format has no values for."""
    if format == "parquet":
        return []
    unreadable = []
    for field in schema:
        try:
            if format == "json":
                list(_json_batches(pa.py_buffer(b"{}"), [field]))
            else:
                list(_csv_batches(pa.py_buffer(_header(field.name)), pa.schema([field]), [field]))
        except pa.ArrowNotImplementedError:
            unreadable.append(field.name)
    return unreadable


def _parquet_batches(data: pa.Buffer, schema: pa.Schema, fields: Sequence[pa.Field]) -> Iterator[pa.RecordBatch]:
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    names = file.schema_arrow.names
    _check_columns(names, schema)
    wanted = [field.name for field in fields if field.name in names]
    yield from file.iter_batches(_ROWS_PER_BATCH, columns=wanted, use_threads=False)


def _json_batches(text: pa.Buffer, fields: Sequence[pa.Field]) -> Iterator[pa.RecordBatch]:
    parse_options = arrow_json.ParseOptions(
        explicit_schema=pa.schema([field.with_type(_json_type(field.type)) for field in fields]),
        unexpected_field_behavior="ignore",
    )
    for piece in _json_pieces(text):
        table = arrow_json.read_json(
            pa.BufferReader(piece),
            # A line must lie in one block: so does the piece.
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=piece.size + 1),
            parse_options=parse_options,
        )
        table.validate(full=True)  # the parser lets through what is not UTF-8
        yield from table.to_batches(max_chunksize=_ROWS_PER_BATCH)


def _json_pieces(text: pa.Buffer) -> Iterator[pa.Buffer]:
    """Cut after ends of lines, and let no piece begin with a bare null, which would crash pyarrow's parser.

    Anywhere else it makes a row of nulls, just as an empty object does.
    """
    if not text.size:
        raise UnreadableFileError("it is empty, without even the end of a line")
    start = 0
    while start < text.size:
        newline = _NEWLINE.search(text, start + _PIECE_BYTES)
        end = newline.end() if newline else text.size
        piece = text.slice(start, end - start)
        if null := _LEADING_NULL.match(piece):
            piece = pa.py_buffer(null[1] + b"{}" + piece.slice(null.end()).to_pybytes())
        yield piece
        start = end


def _csv_batches(text: pa.Buffer, schema: pa.Schema, fields: Sequence[pa.Field]) -> Iterator[pa.RecordBatch]:
    with io.TextIOWrapper(pa.BufferReader(text), encoding="utf-8-sig", newline="") as lines:
        names = next((names for names in csv.reader(lines) if names), [])
    _check_columns(names, schema)
    wanted = [field for field in fields if field.name in names]
    table = arrow_csv.read_csv(
        pa.BufferReader(text),
        read_options=arrow_csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
        parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types={names[0]: pa.string()} | {field.name: field.type for field in wanted},
            include_columns=[field.name for field in wanted] or names[:1],  # some column must count the rows
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    yield from table.to_batches(max_chunksize=_ROWS_PER_BATCH)


def _conformed(batch: pa.RecordBatch, fields: Sequence[pa.Field]) -> pa.RecordBatch:
    names = batch.schema.names
    arrays = []
    for field in fields:
        found = field.name in names
        array = _cast(batch.column(field.name), field) if found else pa.nulls(batch.num_rows, field.type)
        if array.null_count and not field.nullable:
            raise UnreadableFileError(f"its column {field.name!r} has nulls, or is missing, which the schema forbids")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)) if arrays else batch.select([])


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except pa.ArrowException as error:
        cause = _first_line(error)
        raise UnreadableFileError(f"its column {field.name!r} cannot be cast to {field.type}: {cause}") from error


def _check_columns(names: Sequence[str], schema: pa.Schema) -> None:
    twice = [name for name in schema.names if names.count(name) > 1]
    if twice:
        raise UnreadableFileError(f"it has two columns named {twice[0]!r}")
    # All nulls would be a poor way to say that this is some other kind of file, or a CSV file without a header.
    if len(schema) and not set(names) & set(schema.names):
        raise UnreadableFileError(f"it has none of the schema's columns, {', '.join(schema.names)}")


def _decompressed(name: str, data: pa.Buffer) -> pa.Buffer:
    compression = _COMPRESSIONS.get(PurePosixPath(name).suffix)
    if compression is None:
        return data
    with pa.CompressedInputStream(pa.BufferReader(data), compression) as stream:
        return stream.read_buffer()


def _json_type(wanted: pa.DataType) -> pa.DataType:
    """The type to parse JSON to before it is cast: pyarrow takes dates only as numbers, people write them as text."""
    if pa.types.is_date32(wanted):
        return pa.string()
    if pa.types.is_list(wanted):
        return pa.list_(wanted.value_field.with_type(_json_type(wanted.value_type)))
    if pa.types.is_struct(wanted):
        return pa.struct([field.with_type(_json_type(field.type)) for field in wanted])
    return wanted


def _plain(found: pa.DataType) -> pa.DataType:
    return found.value_type if pa.types.is_dictionary(found) else found


def _header(name: str) -> bytes:
    line = io.StringIO()
    csv.writer(line).writerow([name])
    return line.getvalue().encode()


@contextmanager
def _unreadable() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise  # says nothing about the file
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise UnreadableFileError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")
