"""A Delta table, on a local disk and on S3."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from arroyo_dagster.dataflow.sink import Sink, SinkIdentity
from arroyo_dagster.errors import ConfigurationError, ProtocolError, StorageError
from arroyo_dagster.log import open_store
from arroyo_dagster.model import EpochSet, FileEntry, ObjectPath
from arroyo_dagster.sinks import DeltaSink
from arroyo_dagster.sinks.delta_log import DeltaLog, NewFile, TableVersion, delta_options
from arroyo_dagster.sinks.staging import SinkStore
from arroyo_dagster.testing import Crash, Fault
from arroyo_dagster.testing.faults import Call, Faults
from tests.sinks.contract import ONE, FaultySinkStore, Place, SinkContract, machine, shown, stage

_prefixes = count()


class FaultyLog(DeltaLog):
    def __init__(self, url: str, store: FaultySinkStore) -> None:
        super().__init__(url, {})
        self.store = store

    def read(self) -> TableVersion | None:
        with self.failing("read"):
            return super().read()

    def create(self, schema: pa.Schema, transactions: Mapping[str, int]) -> bool:
        with self.failing("create"):
            return super().create(schema, transactions)

    def add_columns(self, table: TableVersion, fields: Sequence[Any]) -> bool:
        with self.failing("add_columns"):
            return super().add_columns(table, fields)

    def commit(
        self, table: TableVersion, add: Sequence[NewFile], remove: Sequence[str], transactions: Mapping[str, int]
    ) -> bool:
        with self.failing("commit"):
            return super().commit(table, add, remove, transactions)

    def failing(self, operation: str) -> AbstractContextManager[None]:
        return self.store.failing(operation, "_delta_log")


class FaultyDeltaSink(DeltaSink):
    def __init__(self, url: str, store: FaultySinkStore) -> None:
        super().__init__(url)
        self.store = store

    def open_store(self) -> SinkStore:
        return self.store

    def open_log(self) -> DeltaLog:
        return FaultyLog(self.url, self.store)


class DeltaPlace(Place):
    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url = url
        self.options = options or {}

    def sink(self, faults: Faults = lambda _: None) -> DeltaSink:
        return FaultyDeltaSink(self.url, FaultySinkStore(open_store(self.url), faults))

    def calls(self, sink: Any) -> list[Call]:
        calls: list[Call] = sink.store.calls
        return calls

    def table(self) -> DeltaTable:
        return DeltaTable(self.url, storage_options=delta_options(self.options))

    def rows(self) -> list[int]:
        if not open_store(self.url, self.options).names(ObjectPath("_delta_log")):
            return []
        return [row["value"] for row in query(self.table(), "select value from t order by value")]

    def lose(self, identity: SinkIdentity, epoch: int, file: FileEntry, index: int) -> str:
        (Path(self.url) / file.path).unlink()
        return str(file.path)

    def close(self) -> None:
        shutil.rmtree(self.url)


def query(table: DeltaTable, sql: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(QueryBuilder().register("t", table).execute(sql).read_all()).to_pylist()
    return rows


def put(sink: Sink, epoch: int, rows: pa.RecordBatch) -> None:
    writer = sink.writer(ONE, epoch, 1, "task")
    writer.write(rows)
    sink.publish(ONE, epoch, writer.close())


class TestLocalDisk(SinkContract):
    kind = DeltaSink

    def new_place(self, path: Path) -> Place:
        return DeltaPlace(str(path.parent / f"my table ü % {path.name}"))


TestMachine = machine(lambda: DeltaPlace(tempfile.mkdtemp(prefix="delta")), examples=12)


class TestTransactions:
    @pytest.fixture
    def place(self, tmp_path: Path) -> DeltaPlace:
        return DeltaPlace(str(tmp_path / "table"))

    def test_an_epoch_is_one_transaction(self, place: DeltaPlace) -> None:
        shown(place, 1, [1])
        before = place.table().version()
        shown(place, 2, [1], [2], [3])
        place.sink().publish(ONE, 3, ())
        assert place.table().version() == before + 1
        assert place.table().transaction_version("arroyo_dagster/auctions/hot/life-one") == 2
        place.sink().retract(ONE, EpochSet.of([1, 2]))
        assert place.table().version() == before + 2
        place.sink().retract(ONE, EpochSet.of([1, 2]))
        assert place.table().version() == before + 2

    def test_others_may_append_and_we_stay_exact(self, place: DeltaPlace) -> None:
        files = shown(place, 1, [1])
        write_deltalake(place.url, pa.table({"value": [100], "text": ["theirs"]}), mode="append")
        shown(place, 2, [2])
        place.sink().publish(ONE, 1, files)
        place.sink().retract(ONE, EpochSet.of([2]))
        place.sink().retract(ONE, EpochSet.of([2]))
        assert place.rows() == [1, 100]

    def test_others_may_be_faster(self, place: DeltaPlace) -> None:
        shown(place, 1, [1])
        theirs = iter([100])

        def append(call: Call) -> None:
            for value in theirs if call.operation == "commit" else ():
                write_deltalake(place.url, pa.table({"value": [value], "text": ["theirs"]}), mode="append")

        place.sink(append).publish(ONE, 2, stage(place.sink(), 2, [2]))
        assert place.rows() == [1, 2, 100]

    def test_writers_that_never_rest_are_a_storage_error(
        self, place: DeltaPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("time.sleep", lambda _: None)
        shown(place, 1, [1])

        def append(call: Call) -> None:
            if call.operation == "commit":
                write_deltalake(place.url, pa.table({"value": [100], "text": ["theirs"]}), mode="append")

        with pytest.raises(StorageError, match="other writers have been faster 20 times at the Delta table"):
            place.sink(append).publish(ONE, 2, stage(place.sink(), 2, [2]))
        assert 2 not in place.rows()

    def test_compaction_does_not_bring_an_epoch_back(self, place: DeltaPlace) -> None:
        files = [shown(place, epoch, [epoch]) for epoch in (1, 2)]
        place.table().optimize.compact()
        for epoch in (1, 2):
            place.sink().publish(ONE, epoch, files[epoch - 1])
            assert place.sink().missing(ONE, epoch, files[epoch - 1]) == []
        shown(place, 3, [3])
        assert place.rows() == [1, 2, 3]
        place.sink().retract(ONE, EpochSet.of([3]))
        assert place.rows() == [1, 2]

    def test_what_was_compacted_is_not_silently_left(self, place: DeltaPlace) -> None:
        for epoch in (1, 2):
            shown(place, epoch, [epoch])
        version = place.table().version()
        place.table().optimize.compact()
        shown(place, 3, [3])
        with pytest.raises(ProtocolError, match=r"hot of auctions cannot retract epoch 2: .*rewritten.*restore"):
            place.sink().retract(ONE, EpochSet.of([2, 3]))
        assert place.rows() == [1, 2, 3]
        place.table().restore(version)
        place.sink().retract(ONE, EpochSet.of([2, 3]))
        assert place.rows() == [1]

    def test_who_has_deleted_the_rows_can_say_so(self, place: DeltaPlace) -> None:
        for epoch in (1, 2):
            shown(place, epoch, [epoch])
        place.table().optimize.compact()
        place.table().delete("value = 2")
        with pytest.raises(ProtocolError, match="delete the rows yourself and then") as raised:
            place.sink().retract(ONE, EpochSet.of([2]))
        Path(str(raised.value).rsplit(" and then ", 1)[1]).unlink()
        place.sink().retract(ONE, EpochSet.of([2]))
        assert place.rows() == [1]

    def test_a_second_retract_does_not_take_its_own_work_for_compaction(self, place: DeltaPlace) -> None:
        shown(place, 1, [1])
        shown(place, 2, [2])
        write_deltalake(place.url, pa.table({"value": [100], "text": ["theirs"]}), mode="append")
        records = open_store(place.url).names(ObjectPath("_published"))
        kept = open_store(place.url).read(records)
        place.sink().retract(ONE, EpochSet.of([2]))
        for path, data in zip(records, kept, strict=True):  # as if it had died before it deleted them
            assert data is not None
            open_store(place.url).create(path, data)
        place.sink().retract(ONE, EpochSet.of([2]))
        assert place.rows() == [1, 100]

    def test_an_epoch_that_was_never_committed_is_not_taken_for_compacted(self, place: DeltaPlace) -> None:
        shown(place, 1, [1])
        write_deltalake(place.url, pa.table({"value": [100], "text": ["theirs"]}), mode="append")
        files = stage(place.sink(), 2, [2])
        dying = place.sink(lambda call: Fault.CRASH_BEFORE if call.operation == "commit" else None)
        with pytest.raises(Crash):
            dying.publish(ONE, 2, files)
        place.sink().retract(ONE, EpochSet.of([2]))
        place.sink().publish(ONE, 2, files)
        assert place.rows() == [1, 100]

    def test_vacuum_spares_the_records(self, place: DeltaPlace) -> None:
        shown(place, 1, [1])
        stage(place.sink(), 2, [2])
        gone = place.table().vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        assert len(gone) == 1
        assert len(open_store(place.url).names(ObjectPath("_published"))) == 1
        assert place.rows() == [1]

    def test_a_directory_that_is_no_table_yet_stays_so_without_rows(self, place: DeltaPlace) -> None:
        place.sink().publish(ONE, 1, ())
        place.sink().retract(ONE, EpochSet.of([1]))
        assert open_store(place.url).names(ObjectPath("_delta_log")) == []


class TestSchemas:
    @pytest.fixture
    def place(self, tmp_path: Path) -> DeltaPlace:
        return DeltaPlace(str(tmp_path / "table"))

    def test_keeps_every_type_that_delta_has(self, place: DeltaPlace) -> None:
        noon = datetime(2024, 5, 1, 12, 0, 0, 123456, tzinfo=UTC)
        row = {
            "flag": True,
            "int": 2**62,
            "real": 1.5,
            "price": Decimal("12345678901234567890.123"),
            "day": date(1969, 7, 20),
            "local": noon.replace(tzinfo=None),
            "utc": noon,
            "text": "größe ☂",
            "bytes": b"\x00\xff",
            "list": [1, None],
            "struct": {"a": 1, "b": [{"c": "x"}]},
            "map": [("k", 1)],
        }
        schema = pa.schema(
            {
                "flag": pa.bool_(),
                "int": pa.int64(),
                "real": pa.float64(),
                "price": pa.decimal128(38, 3),
                "day": pa.date32(),
                "local": pa.timestamp("us"),
                "utc": pa.timestamp("us", "UTC"),
                "text": pa.string(),
                "bytes": pa.binary(),
                "list": pa.list_(pa.int32()),
                "struct": pa.struct({"a": pa.int64(), "b": pa.list_(pa.struct({"c": pa.string()}))}),
                "map": pa.map_(pa.string(), pa.int64()),
            }
        )
        rows = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=schema)
        put(place.sink(), 1, rows)
        assert query(place.table(), "select * from t order by flag nulls last") == [row, dict.fromkeys(row)]

    @pytest.mark.parametrize(
        ("kind", "values", "kept", "expected"),
        [
            (pa.uint32(), [2**32 - 1, None], "long", [2**32 - 1, None]),
            (pa.uint8(), [255], "short", [255]),
            (pa.timestamp("ns", "Europe/Berlin"), [1_000_000], "timestamp", [datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)]),
            (pa.timestamp("s"), [1], "timestamp_ntz", [datetime(1970, 1, 1, 0, 0, 1)]),  # noqa: DTZ001 - it has none
            (pa.large_string(), ["x"], "string", ["x"]),
            (pa.dictionary(pa.int8(), pa.string()), ["x", None], "string", ["x", None]),
            (pa.binary(2), [b"ab"], "binary", [b"ab"]),
            (pa.date64(), [date(2024, 1, 1)], "date", [date(2024, 1, 1)]),
            (pa.large_list(pa.uint8()), [[255]], "array", [[255]]),
            (pa.decimal32(5, 2), [Decimal("1.25")], "decimal(5,2)", [Decimal("1.25")]),
            (pa.float16(), [1.5], "float", [1.5]),
        ],
    )
    def test_widens_what_delta_has_not_quite(
        self, place: DeltaPlace, kind: pa.DataType, values: list[Any], kept: str, expected: list[Any]
    ) -> None:
        put(place.sink(), 1, pa.record_batch({"c": pa.array(values, kind)}))
        assert kept in place.table().schema().fields[0].type.to_json()
        assert [row["c"] for row in query(place.table(), "select c from t order by c")] == expected

    @pytest.mark.parametrize(
        "kind",
        [pa.uint64(), pa.time64("us"), pa.duration("s"), pa.null(), pa.decimal256(60, 2), pa.list_(pa.uint64())],
    )
    def test_refuses_what_delta_lacks_before_anything_is_written(self, tmp_path: Path, kind: pa.DataType) -> None:
        sink = DeltaSink(str(tmp_path / "table"))
        with pytest.raises(ConfigurationError, match=r"the column 'c' is .*, which Delta does not have: cast it"):
            sink.writer(ONE, 1, 1, "task").write(pa.record_batch({"c": pa.array([None], kind)}))
        assert list(tmp_path.rglob("*.parquet")) == []

    def test_refuses_to_lose_nanoseconds(self, tmp_path: Path) -> None:
        writer = DeltaSink(str(tmp_path / "table")).writer(ONE, 1, 1, "task")
        with pytest.raises(ConfigurationError, match=r"the column 'c' has values of type timestamp\[ns\]"):
            writer.write(pa.record_batch({"c": pa.array([1001], pa.timestamp("ns"))}))

    @pytest.mark.parametrize("names", [("a", "A"), ("a b", "c"), ("", "c"), ("x=1", "c")])
    def test_refuses_names_that_readers_stumble_over(self, tmp_path: Path, names: tuple[str, str]) -> None:
        writer = DeltaSink(str(tmp_path / "table")).writer(ONE, 1, 1, "task")
        with pytest.raises(ConfigurationError, match="rename"):
            writer.write(pa.record_batch([pa.array([1]), pa.array([2])], names=list(names)))

    def test_columns_may_be_added(self, place: DeltaPlace) -> None:
        put(place.sink(), 1, pa.record_batch({"value": [1]}))
        put(place.sink(), 2, pa.record_batch({"at": pa.array([2], pa.timestamp("us")), "value": [2]}))
        put(place.sink(), 3, pa.record_batch({"value": [3]}))
        assert [row["at"] is None for row in query(place.table(), "select at from t order by value")] == [
            True,
            False,
            True,
        ]

    def test_a_column_of_another_type_is_refused(self, place: DeltaPlace) -> None:
        put(place.sink(), 1, pa.record_batch({"value": [1]}))
        with pytest.raises(ConfigurationError, match=r"the column 'value' is long in the Delta table and string in"):
            put(place.sink(), 2, pa.record_batch({"value": ["x"]}))
        assert place.rows() == [1]

    def test_a_column_that_the_table_insists_on_is_missed(self, place: DeltaPlace) -> None:
        schema = pa.schema([pa.field("value", pa.int64()), pa.field("must", pa.int64(), nullable=False)])
        DeltaTable.create(place.url, schema)
        with pytest.raises(ConfigurationError, match="wants a value for 'must'"):
            put(place.sink(), 1, pa.record_batch({"value": [1]}))

    def test_statistics_never_hide_a_row(self, place: DeltaPlace) -> None:
        noon = datetime(2024, 5, 1, 12, 0, 0, 123456, tzinfo=UTC)
        moments = [noon, noon + timedelta(microseconds=1)]
        put(
            place.sink(),
            1,
            pa.record_batch(
                {
                    "value": pa.array([-5, 7]),
                    "at": pa.array(moments, pa.timestamp("us", "UTC")),
                    "day": pa.array([date(1960, 1, 1), date(2024, 1, 1)]),
                    "real": [1.0, float("nan")],
                    "null": pa.array([None, None], pa.int64()),
                }
            ),
        )
        [actions] = pa.table(place.table().get_add_actions()).to_pylist()
        assert actions["num_records"] == 2
        assert (actions["min"]["value"], actions["max"]["value"]) == (-5, 7)
        assert actions["null_count"]["null"] == 2
        assert actions["max"].get("real") is None  # it is not a number, which is more than any
        assert actions["min"]["at"] <= moments[0] < moments[1] <= actions["max"]["at"]
        for condition in ("value = 7", "at > '2024-05-01T12:00:00.123456Z'", "day < '1960-01-02'"):
            assert len(query(place.table(), f"select * from t where {condition}")) == 1, condition


class TestS3:
    def test_publishes_and_retracts(self, s3_options: dict[str, Any]) -> None:
        url = f"s3://bucket/table-{next(_prefixes)}"
        sink, place = DeltaSink(url, storage_options=s3_options), DeltaPlace(url, s3_options)
        files = [stage(sink, epoch, [epoch], [epoch * 10]) for epoch in (1, 2)]
        for _ in range(2):
            for epoch in (1, 2):
                sink.publish(ONE, epoch, files[epoch - 1])
        assert paths(place) == {str(file.path) for epoch in files for file in epoch}
        assert sink.missing(ONE, 1, files[0]) == []
        sink.retract(ONE, EpochSet.of([2]))
        sink.publish(ONE, 2, files[1])
        assert paths(place) == {str(file.path) for file in files[0]}

    def test_a_server_that_is_away_is_a_storage_error_of_one_line(self, s3_options: dict[str, Any]) -> None:
        away = {**s3_options, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
        sink = DeltaSink("s3://bucket/table", storage_options=away)
        with pytest.raises(
            StorageError, match=r"could not read the Delta table s3://bucket/table: .*refused"
        ) as raised:
            sink.missing(ONE, 1, ())
        assert str(raised.value).isprintable()

    def test_options_are_given_once_for_both_libraries(self) -> None:
        assert delta_options(
            {
                "region": "eu",
                "virtual_hosted_style_request": True,
                "client_options": {"allow_http": True, "timeout": timedelta(seconds=4)},
                "retry_config": {"max_retries": 2, "backoff": {"base": 2}},
            }
        ) == {
            "region": "eu",
            "virtual_hosted_style_request": "true",
            "allow_http": "true",
            "timeout": "4000ms",
            "max_retries": "2",
            "backoff_config.base": "2",
        }
        with pytest.raises(ConfigurationError, match="'credential_provider' cannot be used for a Delta table"):
            delta_options({"credential_provider": lambda: None})


def paths(place: DeltaPlace) -> set[str]:
    return TableVersion(place.table()).paths()
