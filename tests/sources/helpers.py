"""What the tests of file sources share."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pendulum
import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.dataflow.source import Offsets, ReadReport
from arroyo_dagster.model import JsonValue
from arroyo_dagster.sources import FileSource

NOW = pendulum.datetime(2025, 6, 1)
ID = pa.schema([("id", pa.int64())])


def write(directory: Path, name: str, ids: Sequence[int | None] = (1,), modified: int | None = None) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), path)
    if modified is not None:
        os.utime(path, (modified, modified))
    return path


def read(source: FileSource, start: JsonValue, end: JsonValue, columns: Sequence[str] | None = None) -> pa.Table:
    batches = [batch for split in source.splits(start, end) for batch in source.read(split, columns, ReadReport())]
    return pa.Table.from_batches(batches, None if batches else source.schema_at(end))


def paths(source: FileSource, start: JsonValue, end: JsonValue) -> list[str]:
    values: list[Any] = [split.value for split in source.splits(start, end)]
    return [value["path"] for value in values]


def next_paths(source: FileSource, start: JsonValue) -> tuple[list[str], Offsets]:
    offsets = source.latest(start, NOW)
    return paths(source, start, offsets.end), offsets


def only_row(source: FileSource) -> dict[str, Any]:
    [row] = read(source, None, source.latest(None, NOW).end).to_pylist()
    return dict(row)


def parquet_bytes(**columns: Any) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return bytes(out.getvalue())
