"""Immutable Parquet files on storage: written once under a name of their own, and checked when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from arroyo_dagster.errors import DamagedObjectError, StorageError
from arroyo_dagster.log import Creation, Store
from arroyo_dagster.model import FileEntry, ObjectPath
from arroyo_dagster.state.hashing import content_digest, digest_text

_FILE_BYTES = 128 << 20
_SAMPLE = 4096


def checksum(data: bytes | pa.Buffer) -> str:
    """The checksum of a file's bytes."""
    return sha256(data).hexdigest()


def write_table(
    store: Store,
    path: ObjectPath,
    table: pa.Table,
    key_groups: tuple[int, int] | None = None,
    times: tuple[int, int] | None = None,
) -> FileEntry:
    """Write rows as one Parquet file."""
    out = pa.BufferOutputStream()
    with _parquet(out, table) as writer:
        writer.write_table(table)
    return _store(store, path, out.getvalue(), table.num_rows, content_digest(table), key_groups, times)


def read_verified(store: Store, entry: FileEntry) -> bytes:
    """Read a file's bytes, and see that they are the ones that were written."""
    [data] = store.read([entry.path])
    if data is None:
        raise DamagedObjectError(
            f"{store.url}/{entry.path} is lost: restore it, or rewind to an epoch that does without"
        )
    if checksum(data) != entry.checksum:
        raise DamagedObjectError(
            f"{store.url}/{entry.path} is damaged: its content does not match the manifest's checksum; restore it, "
            "or rewind to an epoch that does without"
        )
    return data


def read_table(store: Store, entry: FileEntry, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file's rows, once its bytes are known to be right."""
    return pq.read_table(pa.BufferReader(read_verified(store, entry)), columns=columns, use_threads=False)


class RollingParquet:
    """Writes batches to Parquet files of about one size. `name` makes the path of the nth one."""

    def __init__(self, store: Store, name: Callable[[int], ObjectPath], file_bytes: int = _FILE_BYTES) -> None:
        """Open nothing yet: without rows there is no file."""
        self._store = store
        self._name = name
        self._file_bytes = file_bytes
        self._files: list[FileEntry] = []
        self._out: pa.BufferOutputStream | None = None
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0
        self._digest = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows."""
        if not batch.num_rows:
            return
        if self._writer is None:
            self._out = pa.BufferOutputStream()
            self._writer = _parquet(self._out, batch)
        self._writer.write_batch(batch)
        self._rows += batch.num_rows
        self._digest += content_digest(batch)
        assert self._out is not None
        if self._out.tell() >= self._file_bytes:
            self._finish()

    def close(self) -> tuple[FileEntry, ...]:
        """Make the last file durable, and tell which were written."""
        self._finish()
        return tuple(self._files)

    def _finish(self) -> None:
        if self._writer is None or self._out is None:
            return
        self._writer.close()
        path = self._name(len(self._files))
        self._files.append(_store(self._store, path, self._out.getvalue(), self._rows, self._digest, None, None))
        self._out, self._writer, self._rows, self._digest = None, None, 0, 0


def _parquet(out: pa.BufferOutputStream, rows: pa.RecordBatch | pa.Table) -> pq.ParquetWriter:
    """A writer with the encodings that fit the first rows: cheaper to write, and smaller, than compression alone."""
    repeated = [name for name in rows.schema.names if _repeats(rows.column(name))]
    deltas = [field.name for field in rows.schema if field.name not in repeated and _is_whole(field.type)]
    return pq.ParquetWriter(
        out,
        rows.schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=repeated or False,
        column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED") or None,
    )


def _repeats(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether values come again and again, so that a dictionary pays."""
    if types.is_nested(column.type) or types.is_boolean(column.type) or types.is_null(column.type):
        return False
    sample = column.slice(0, _SAMPLE)
    try:
        return len(sample.unique()) * 8 <= len(sample)
    except pa.ArrowNotImplementedError:  # small decimals and extension types, for example
        return False


def _is_whole(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_timestamp(kind) or types.is_date32(kind))


def create_checked(store: Store, path: ObjectPath, data: pa.Buffer) -> str:
    """Create an object under a name of our own, and return its checksum. An unclear answer is cleared up."""
    expected = checksum(data)
    try:
        if store.create(path, data.to_pybytes()) is Creation.CREATED:
            return expected
        failure = StorageError(f"{store.url}/{path} exists already, and is not what was to be written there")
    except StorageError as error:
        failure = error
    # The answer to a request may be lost, and a client that repeats it finds its own object.
    [found] = store.read([path])
    if found is None or checksum(found) != expected:
        raise failure
    return expected


def _store(
    store: Store,
    path: ObjectPath,
    data: pa.Buffer,
    rows: int,
    digest: int,
    key_groups: tuple[int, int] | None,
    times: tuple[int, int] | None,
) -> FileEntry:
    return FileEntry(path, rows, data.size, key_groups, times, create_checked(store, path, data), digest_text(digest))
