"""Plain Parquet files, on every kind of storage."""

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pendulum
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.dataflow.sink import SinkIdentity
from arroyo_dagster.errors import ConfigurationError, StorageError
from arroyo_dagster.log import open_store
from arroyo_dagster.model import EpochSet, FileEntry, ObjectPath
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.sinks.staging import SinkStore, owner
from arroyo_dagster.testing import Fault
from arroyo_dagster.testing.faults import Call, Faults
from tests.sinks.contract import ONE, FaultySinkStore, Place, SinkContract, at, machine, shown, stage

_prefixes = count()


class FaultyParquetSink(ParquetSink):
    def __init__(self, store: FaultySinkStore) -> None:
        super().__init__("elsewhere")
        self.store = store

    def open_store(self) -> SinkStore:
        return self.store


class ParquetPlace(Place):
    def __init__(self, store: SinkStore) -> None:
        self.store = store

    def sink(self, faults: Faults = lambda _: None) -> FaultyParquetSink:
        return FaultyParquetSink(FaultySinkStore(self.store, faults))

    def calls(self, sink: Any) -> list[Call]:
        calls: list[Call] = sink.store.calls
        return calls

    def rows(self) -> list[int]:
        tables = [pq.read_table(pa.BufferReader(data)) for data in self.store.read(self.store.top_names()) if data]
        return sorted(value for table in tables for value in table.column("value").to_pylist())

    def lose(self, identity: SinkIdentity, epoch: int, file: FileEntry, index: int) -> str:
        name = f"epoch-{epoch:010d}-{owner(identity)}-{index:04d}.parquet"
        self.store.delete(ObjectPath(name))
        return name


class ParquetContract(SinkContract):
    kind = ParquetSink


class TestInMemory(ParquetContract):
    def new_place(self, path: Path) -> Place:
        return ParquetPlace(open_store("memory://"))


class TestLocalDisk(ParquetContract):
    def new_place(self, path: Path) -> Place:
        return ParquetPlace(open_store(str(path)))

    @pytest.mark.parametrize("fault", [Fault.AFTER, Fault.CRASH_AFTER])
    def test_one_fault_anywhere_changes_nothing_in_the_end(self, places: Iterator[Place], fault: Fault) -> None:
        super().test_one_fault_anywhere_changes_nothing_in_the_end(places, fault)

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "my output ü"

    def test_leaves_nothing_staged(self, directory: Path) -> None:
        sink = ParquetSink(str(directory))
        stage(sink, 1, [1], [2], attempt=1)
        sink.publish(ONE, 1, stage(sink, 1, [1], [2], attempt=2))
        stage(sink, 2, [2])
        sink.retract(ONE, EpochSet.of([2]))
        assert [path for path in (directory / "_staging").rglob("*") if path.is_file()] == []

    def test_clears_away_what_replays_of_earlier_epochs_left_a_day_ago(self, directory: Path) -> None:
        sink = ParquetSink(str(directory))
        [old] = stage(sink, 1, [1])
        [fresh] = stage(sink, 1, [1], attempt=2)
        [later] = stage(sink, 9, [9])
        for file in (old, later):
            os.utime(directory / file.path, (pendulum.now("UTC").subtract(days=2).timestamp(),) * 2)
        sink.publish(ONE, 2, stage(sink, 2, [2]))
        assert [(directory / file.path).exists() for file in (old, fresh, later)] == [False, True, True]

    def test_a_published_file_survives_a_power_cut(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sink = ParquetSink(str(directory))
        [file] = stage(sink, 1, [1])
        flushed: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        sink.publish(ONE, 1, [file])
        target = directory / f"epoch-0000000001-{owner(ONE)}-0000.parquet"
        assert {str(target), str(directory), str((directory / file.path).parent)} <= set(flushed)

    def test_a_replay_heals_what_was_lost_however_its_rows_are_spread(self, directory: Path) -> None:
        place = ParquetPlace(open_store(str(directory)))
        files = shown(place, 1, [1], [2], [3], [4])
        place.lose(ONE, 1, files[0], 0)
        place.sink().publish(ONE, 1, stage(place.sink(), 1, [4, 3], [2, 1], attempt=2))
        assert place.rows() == [1, 2, 3, 4]

    def test_a_replay_with_the_same_rows_in_other_bytes_is_not_damage(self, directory: Path) -> None:
        place = ParquetPlace(open_store(str(directory)))
        files = shown(place, 1, [1, 2], [3, 4])
        place.sink().publish(ONE, 1, stage(place.sink(), 1, [2, 1], [4, 3], attempt=2))
        assert place.sink().missing(ONE, 1, files) == []
        place.sink().publish(ONE, 1, stage(place.sink(), 1, [2, 1], [4, 5], attempt=3))
        assert len(place.sink().missing(ONE, 1, files)) == 2

    def test_says_what_is_damaged(self, directory: Path) -> None:
        place = ParquetPlace(open_store(str(directory)))
        files = shown(place, 1, [1], [2])
        target = directory / f"epoch-0000000001-{owner(ONE)}-0001.parquet"
        target.write_bytes(target.read_bytes()[:-9])
        assert place.sink().missing(ONE, 1, files) == [target.name]

    def test_a_zombies_copy_that_lands_late_is_swept_away(self, directory: Path) -> None:
        place = ParquetPlace(open_store(str(directory)))
        shown(place, 1, [1])
        [file] = directory.glob("*.parquet")
        data = file.read_bytes()
        place.sink().retract(ONE, EpochSet.of([1]))
        file.write_bytes(data)
        shown(place, 2, [2])
        assert place.rows() == [2]

    def test_a_zombie_that_is_past_its_check_cannot_outrun_a_retract(self, tmp_path: Path) -> None:
        calls = 0
        for number in range(1, 100):
            place = ParquetPlace(open_store(str(tmp_path / str(number))))
            files = stage(place.sink(), 1, [1], [2])

            def move(place: ParquetPlace = place, files: Sequence[FileEntry] = files) -> None:
                for index, file in enumerate(files):
                    place.store.move(file.path, ObjectPath(f"epoch-0000000001-{owner(ONE)}-{index:04d}.parquet"))

            sink = place.sink(at(number, move))
            sink.retract(ONE, EpochSet.of([1]))
            assert place.rows() == [], f"call {number}"
            if len(place.calls(sink)) < number:
                break
            calls += 1
        assert calls >= 4

    def test_a_retracted_epoch_does_not_appear_even_for_a_moment(self, directory: Path) -> None:
        place = ParquetPlace(open_store(str(directory)))
        place.sink().retract(ONE, EpochSet.of([1]))
        sink = place.sink()
        sink.publish(ONE, 1, stage(place.sink(), 1, [1]))
        assert "move" not in {call.operation for call in place.calls(sink)}
        assert place.store.names(ObjectPath("_staging")) == []

    def test_a_relative_directory_is_the_same_for_every_task(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert ParquetSink("data/hot").url == str(tmp_path / "data" / "hot")
        assert ParquetSink((tmp_path / "my ü").as_uri()).url == str(tmp_path / "my ü")

    def test_memory_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="cannot be in memory://"):
            ParquetSink("memory://")


class TestS3:
    def test_publishes_and_retracts(self, s3_options: dict[str, Any]) -> None:
        sink = ParquetSink(f"s3://bucket/output-{next(_prefixes)}", storage_options=s3_options)
        place = ParquetPlace(open_store(sink.url, s3_options))
        files = [stage(sink, epoch, [epoch], [epoch * 10]) for epoch in (1, 2)]
        for _ in range(2):
            for epoch in (1, 2):
                sink.publish(ONE, epoch, files[epoch - 1])
        assert place.rows() == [1, 2, 10, 20]
        assert sink.missing(ONE, 1, files[0]) == []
        assert place.store.names(ObjectPath("_staging")) == []
        sink.retract(ONE, EpochSet.of([2]))
        sink.publish(ONE, 2, files[1])
        assert place.rows() == [1, 10]

    def test_a_bucket_that_does_not_exist_is_a_storage_error(self, s3_options: dict[str, Any]) -> None:
        sink = ParquetSink("s3://nobody-made-this/output", storage_options=s3_options)
        with pytest.raises(StorageError, match="could not"):
            sink.publish(ONE, 1, ())


TestMachine = machine(lambda: ParquetPlace(open_store("memory://")), examples=60)
