"""Sources, sinks and operators that only stand in a graph."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster import Pipeline
from arroyo_dagster.dataflow import Offsets, Operator, ReadReport, Sink, SinkIdentity, Source, Split, StagedWriter
from arroyo_dagster.dataflow.stream import Stream
from arroyo_dagster.dataflow.tables import TableSpec
from arroyo_dagster.model import EpochSet, FileEntry, JsonValue

TIME = pa.timestamp("us", "UTC")
BIDS = pa.schema(
    [
        ("auction", pa.int64()),
        ("price", pa.decimal128(10, 2)),
        ("name", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("at", TIME),
    ]
)


class Rows(Source):
    """A source of no rows."""

    def __init__(self, schema: pa.Schema | None = BIDS) -> None:
        self._schema = schema

    @property
    def schema(self) -> pa.Schema | None:
        return self._schema

    def latest(self, start: JsonValue, now: DateTime) -> Offsets:
        return Offsets(start)

    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        return ()

    def read(self, split: Split, columns: Sequence[str] | None, report: ReadReport) -> Iterator[pa.RecordBatch]:
        return iter(())


class Nowhere(Sink):
    """A sink of no rows."""

    def writer(self, identity: SinkIdentity, epoch: int, attempt: int, name: str) -> StagedWriter:
        raise NotImplementedError

    def publish(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> None:
        raise NotImplementedError

    def retract(self, identity: SinkIdentity, epochs: EpochSet) -> None:
        raise NotImplementedError

    def discard(self, identity: SinkIdentity, files: Sequence[FileEntry]) -> None:
        raise NotImplementedError

    def missing(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> Sequence[str]:
        raise NotImplementedError


class With(Operator):
    """An operator with these tables."""

    def __init__(self, *tables: TableSpec) -> None:
        self._tables = tables

    def tables(self) -> Sequence[TableSpec]:
        return self._tables


def bids(pipeline: Pipeline | None = None, name: str = "bids", event_time: str | None = "at") -> Stream:
    return (pipeline or Pipeline("auctions")).source(name, Rows(), event_time=event_time)
