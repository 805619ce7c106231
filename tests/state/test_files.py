"""Parquet files on storage: what is written is read back, and whatever is not that is named."""

from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.errors import DamagedObjectError, StorageError
from arroyo_dagster.log import ObjectStorage
from arroyo_dagster.model import FileEntry, ObjectPath
from arroyo_dagster.state.files import RollingParquet, checksum, read_table, read_verified, write_table
from arroyo_dagster.state.hashing import content_digest, digest_text, sum_digests
from arroyo_dagster.testing import Crash, Fault, FaultyStore, at_call

PATH = ObjectPath("epochs/1/file.parquet")
TABLE = pa.table({"n": [1, None, 3], "t": ["a", "b", None]})

# Whatever Parquet can hold comes back as it was; where its type is another, the values are the same.
COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [-128, 127]),
    (pa.int16(), [-1, 1]),
    (pa.int32(), [-1, 1]),
    (pa.int64(), [-(2**63), 2**63 - 1]),
    (pa.uint8(), [0, 255]),
    (pa.uint16(), [0, 2**16 - 1]),
    (pa.uint32(), [0, 2**32 - 1]),
    (pa.uint64(), [0, 2**64 - 1]),
    (pa.float16(), [1.5, -0.0]),
    (pa.float32(), [1.5, float("inf")]),
    (pa.float64(), [1.5, -0.0]),
    (pa.bool_(), [True, False]),
    (pa.string(), ["", "naïve ☃"]),
    (pa.large_string(), ["", "naïve ☃"]),
    (pa.string_view(), ["", "naïve ☃"]),
    (pa.binary(), [b"", b"\0\xff"]),
    (pa.large_binary(), [b"", b"\0\xff"]),
    (pa.binary_view(), [b"", b"\0\xff"]),
    (pa.binary(3), [b"abc", b"\0\0\0"]),
    (pa.decimal32(9, 2), [Decimal("1.23"), Decimal("-1.23")]),
    (pa.decimal64(18, 2), [Decimal("1.23"), Decimal("-1.23")]),
    (pa.decimal128(38, 2), [Decimal("1.23"), Decimal(-(10**30))]),
    (pa.decimal256(76, 2), [Decimal("1.23"), Decimal(-(10**60))]),
    (pa.date32(), [date(2026, 11, 18), date(1900, 1, 1)]),
    (pa.date64(), [date(2026, 11, 18), date(1900, 1, 1)]),
    (pa.timestamp("s"), [-1, 2**31]),
    (pa.timestamp("ms"), [-1, 2**31]),
    (pa.timestamp("us"), [-1, 2**31]),
    (pa.timestamp("ns"), [-1, 2**31]),
    (pa.timestamp("us", "Asia/Tokyo"), [-1, 2**31]),
    (pa.time32("s"), [time(12, 30)]),
    (pa.time32("ms"), [time(12, 30)]),
    (pa.time64("us"), [time(12, 30, 0, 1)]),
    (pa.time64("ns"), [1]),
    (pa.duration("s"), [-1, 1]),
    (pa.duration("ns"), [-1, 1]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"]),
    (pa.struct([("a", pa.int32()), ("b", pa.string())]), [{"a": 1, "b": None}]),
    (pa.list_(pa.int32()), [[], [1, None]]),
    (pa.large_list(pa.int32()), [[], [1, None]]),
    (pa.list_(pa.int32(), 2), [[1, None]]),
    (pa.map_(pa.string(), pa.int32()), [[], [("a", 1)]]),
    (pa.null(), [None]),
    (pa.uuid(), [b"0" * 16]),
]


@pytest.mark.parametrize(("kind", "values"), COLUMNS, ids=[str(kind) for kind, _ in COLUMNS])
def test_every_type_survives_the_round_trip(kind: pa.DataType, values: list[Any], memory_store: ObjectStorage) -> None:
    extension = isinstance(kind, pa.BaseExtensionType)
    column = pa.array([*values, None], kind.storage_type if extension else kind)
    table = pa.table(
        {"v": pa.ExtensionArray.from_storage(kind, column) if extension else column, "n": range(len(column))}
    )
    entry = write_table(memory_store, PATH, table, (3, 7), (-5, 5))
    found = read_table(memory_store, entry)
    assert found["v"].cast(kind).to_pylist() == table["v"].to_pylist()
    assert digest_text(content_digest(found)) == entry.digest == digest_text(content_digest(table))
    data = read_verified(memory_store, entry)
    assert entry == FileEntry(PATH, len(column), len(data), (3, 7), (-5, 5), checksum(data), entry.digest)
    assert read_table(memory_store, entry, ["n"]).column_names == ["n"]


def test_no_rows_are_a_file_too(memory_store: ObjectStorage) -> None:
    entry = write_table(memory_store, PATH, TABLE.slice(0, 0))
    assert read_table(memory_store, entry).equals(TABLE.slice(0, 0))


class Altered:
    """A store that gives other bytes than it has."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        self.url = "s3://bucket/auctions"

    def read(self, paths: list[ObjectPath]) -> list[bytes | None]:
        return [self.data for _ in paths]


class TestDamage:
    where = r"^s3://bucket/auctions/epochs/1/file.parquet is "

    def refused(self, data: bytes | None, entry: FileEntry, what: str) -> None:
        with pytest.raises(DamagedObjectError, match=self.where + what):
            read_table(Altered(data), entry)  # type: ignore[arg-type]

    def test_every_flipped_byte_is_noticed(self, memory_store: ObjectStorage) -> None:
        entry = write_table(memory_store, PATH, TABLE)
        data = read_verified(memory_store, entry)
        assert read_table(Altered(data), entry).equals(TABLE)  # type: ignore[arg-type]
        for place in range(len(data)):
            self.refused(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :], entry, "damaged: ")

    def test_every_truncation_is_noticed(self, memory_store: ObjectStorage) -> None:
        entry = write_table(memory_store, PATH, TABLE)
        data = read_verified(memory_store, entry)
        for length in range(len(data)):
            self.refused(data[:length], entry, "damaged: ")
        self.refused(data + b"\0", entry, "damaged: ")

    def test_a_lost_file_is_noticed(self, memory_store: ObjectStorage) -> None:
        self.refused(None, write_table(memory_store, PATH, TABLE), "lost: restore it, or rewind")


class TestUnclearWrites:
    def test_one_that_only_seems_to_fail_has_succeeded(self, memory_store: ObjectStorage) -> None:
        entry = write_table(FaultyStore(memory_store, at_call(1, Fault.AFTER)), PATH, TABLE)
        assert read_table(memory_store, entry).equals(TABLE)

    def test_one_that_fails_before_has_failed(self, memory_store: ObjectStorage) -> None:
        with pytest.raises(StorageError, match="injected fault at call 1: create"):
            write_table(FaultyStore(memory_store, at_call(1, Fault.BEFORE)), PATH, TABLE)
        assert memory_store.read([PATH]) == [None]

    def test_one_that_cannot_be_looked_at_afterwards_has_failed(self, memory_store: ObjectStorage) -> None:
        with pytest.raises(StorageError):
            write_table(FaultyStore(memory_store, lambda _: Fault.AFTER), PATH, TABLE)

    def test_a_crash_is_one(self, memory_store: ObjectStorage) -> None:
        with pytest.raises(Crash):
            write_table(FaultyStore(memory_store, at_call(1, Fault.CRASH_AFTER)), PATH, TABLE)

    def test_one_that_is_repeated_finds_its_own_object(self, memory_store: ObjectStorage) -> None:
        assert write_table(memory_store, PATH, TABLE) == write_table(memory_store, PATH, TABLE)

    def test_another_object_of_that_name_is_refused(self, memory_store: ObjectStorage) -> None:
        write_table(memory_store, PATH, TABLE)
        with pytest.raises(StorageError, match=r"/epochs/1/file.parquet exists already, and is not what was"):
            write_table(memory_store, PATH, TABLE.slice(1))
        with pytest.raises(StorageError, match="injected fault"):
            write_table(FaultyStore(memory_store, at_call(1, Fault.AFTER)), PATH, TABLE.slice(1))


class TestRollingParquet:
    def name(self, number: int) -> ObjectPath:
        return ObjectPath(f"out/{number}.parquet")

    def test_without_rows_there_is_no_file(self, memory_store: ObjectStorage) -> None:
        writer = RollingParquet(memory_store, self.name)
        writer.write(pa.RecordBatch.from_pydict({"n": []}))
        assert writer.close() == ()
        assert memory_store.names(ObjectPath("out")) == []

    def test_files_stay_near_their_size_and_together_hold_everything(self, memory_store: ObjectStorage) -> None:
        writer = RollingParquet(memory_store, self.name, file_bytes=10_000)
        random = np.random.default_rng(0)
        batches = [pa.RecordBatch.from_pydict({"n": random.integers(0, 1 << 62, 200)}) for _ in range(50)]
        for batch in batches:
            writer.write(batch)
        files = writer.close()
        assert [file.path for file in files] == [self.name(number) for number in range(len(files))]
        assert len(files) > 3
        assert all(10_000 <= file.bytes < 15_000 for file in files[:-1])
        whole = pa.Table.from_batches(batches)
        assert pa.concat_tables(read_table(memory_store, file) for file in files).equals(whole)
        assert sum(file.rows for file in files) == whole.num_rows
        assert sum_digests(file.digest for file in files) == digest_text(content_digest(whole))

    def test_a_small_output_is_one_file_that_others_can_read(self, local_store: ObjectStorage) -> None:
        writer = RollingParquet(local_store, self.name)
        for batch in TABLE.to_batches(max_chunksize=1):
            writer.write(batch)
        [file] = writer.close()
        assert pq.read_table(f"{local_store.url}/{file.path}").equals(TABLE)
        assert (file.key_groups, file.times) == (None, None)
