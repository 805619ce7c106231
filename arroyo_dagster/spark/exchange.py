"""Rows between two stages: compressed Arrow IPC under the attempt's prefix, written by one and read by the other."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster.dataflow.source import Offsets, ReadReport, Source, Split
from arroyo_dagster.errors import DamagedObjectError
from arroyo_dagster.log import Store
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.model import JsonValue, ObjectPath
from arroyo_dagster.spark.reports import Exchange, ExchangeFile
from arroyo_dagster.state.files import checksum, create_checked

_FILE_BYTES = 128 << 20


class ExchangeWriter:
    """Takes the rows of one subtask. `name` makes the path of the nth file."""

    def __init__(self, store: Store, name: Callable[[int], ObjectPath]) -> None:
        """Open nothing yet: without rows there is no file."""
        self._store = store
        self._name = name
        self._files: list[ExchangeFile] = []
        self._schema: pa.Schema | None = None
        self._out: pa.BufferOutputStream | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows."""
        if not batch.num_rows:
            return
        if self._writer is None:
            self._schema = self._schema or batch.schema
            self._out = pa.BufferOutputStream()
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(self._out, self._schema, options=options)
        self._writer.write_batch(batch)
        self._rows += batch.num_rows
        assert self._out is not None
        if self._out.tell() >= _FILE_BYTES:
            self._finish()

    def close(self, watermark: int | None, *, timed: bool, idle: bool) -> Exchange:
        """Make everything durable, and tell what there is."""
        self._finish()
        schema = None if self._schema is None else pack_schema(self._schema)
        return Exchange(tuple(self._files), schema, watermark, timed, idle)

    def _finish(self) -> None:
        if self._writer is None or self._out is None:
            return
        self._writer.close()
        data, path = self._out.getvalue(), self._name(len(self._files))
        self._files.append(ExchangeFile(path, self._rows, data.size, create_checked(self._store, path, data)))
        self._out, self._writer, self._rows = None, None, 0


class ExchangeSource(Source):
    """What an earlier stage of the same attempt has left."""

    def __init__(self, exchange: Exchange, open_state: Callable[[], Store]) -> None:
        """Read `exchange` from the storage that `open_state` opens in the task."""
        self._exchange = exchange
        self._open_state = open_state

    @property
    def schema(self) -> pa.Schema | None:
        """The rows' schema; None when there are none."""
        return None if self._exchange.schema is None else unpack_schema(self._exchange.schema)

    def latest(self, start: JsonValue, now: DateTime) -> Offsets:
        """All there is."""
        return Offsets(None)

    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        """One for each file."""
        return [Split(encode(file), file.rows) for file in self._exchange.files]

    def read(self, split: Split, columns: Sequence[str] | None, report: ReadReport) -> Iterator[pa.RecordBatch]:
        """Read one file, once its bytes are known to be right."""
        file, store = decode(ExchangeFile, split.value, "an exchange"), self._open_state()
        [data] = store.read([file.path])
        if data is None or checksum(data) != file.checksum:
            raise DamagedObjectError(f"{store.url}/{file.path} is lost or damaged: the attempt has to start over")
        for batch in pa.ipc.open_stream(data):
            yield batch if columns is None else batch.select(list(columns))


def pack_schema(schema: pa.Schema) -> str:
    """A schema as text."""
    return base64.b64encode(schema.remove_metadata().serialize()).decode()


def unpack_schema(text: str) -> pa.Schema:
    """The schema that such a text stands for."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
