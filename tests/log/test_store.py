"""One contract, kept by every kind of storage."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from arroyo_dagster.errors import ConfigurationError, StorageError
from arroyo_dagster.log import Creation, ObjectStorage, open_store
from arroyo_dagster.model import ObjectPath

A, B = ObjectPath("log/a.json"), ObjectPath("log/b.json")


class StoreContract:
    """Subclass it with a fixture `store` for each kind of storage."""

    def test_creates_an_object_once(self, store: ObjectStorage) -> None:
        assert store.create(A, b"first") is Creation.CREATED
        assert store.create(A, b"second") is Creation.TAKEN
        assert store.read([A]) == [b"first"]

    def test_reads_many_in_order_and_says_what_is_absent(self, store: ObjectStorage) -> None:
        paths = [ObjectPath(f"log/{number}.json") for number in range(20)]
        for path in paths[::2]:
            store.create(path, path.encode())
        assert store.read(paths) == [path.encode() if at % 2 == 0 else None for at, path in enumerate(paths)]
        assert store.read([]) == []

    def test_reads_an_empty_object(self, store: ObjectStorage) -> None:
        store.create(A, b"")
        assert store.read([A]) == [b""]

    def test_names_what_lies_below_a_prefix_in_order(self, store: ObjectStorage) -> None:
        for name in ("log/2", "log/10", "log/deep/er", "logs/1", "other"):
            store.create(ObjectPath(name), b"x")
        assert store.names(ObjectPath("log")) == ["log/10", "log/2", "log/deep/er"]
        assert store.names(ObjectPath("nothing")) == []

    def test_deletes_and_does_not_mind_if_there_is_nothing(self, store: ObjectStorage) -> None:
        store.create(A, b"x")
        store.delete(A)
        store.delete(A)
        assert store.read([A]) == [None]
        assert store.create(A, b"again") is Creation.CREATED

    def test_moves_an_object_and_replaces_what_had_its_name(self, store: ObjectStorage) -> None:
        store.create(A, b"new")
        store.create(B, b"old")
        assert store.move(A, B)
        assert store.read([A, B]) == [None, b"new"]
        assert not store.move(A, B)
        assert store.read([B]) == [b"new"]

    def test_tells_the_size_of_an_object_and_reads_a_part_of_it(self, store: ObjectStorage) -> None:
        store.create(A, b"0123456789")
        assert (store.size(A), store.size(B)) == (10, None)
        assert (store.read_range(A, 7, 10), store.read_range(B, 7, 10)) == (b"789", None)

    def test_names_what_lies_here_and_not_in_folders(self, store: ObjectStorage) -> None:
        for name in ("b", "a", "log/a", "deep/er/a"):
            store.create(ObjectPath(name), b"x")
        assert store.top_names() == ["a", "b"]
        assert store.below("deep").top_names() == []
        assert store.below("deep/er").top_names() == ["a"]

    def test_names_what_was_written_before_a_moment(self, store: ObjectStorage) -> None:
        store.create(A, b"x")
        now = datetime.now(UTC)
        assert store.written_before(ObjectPath("log"), now - timedelta(minutes=1)) == []
        assert store.written_before(ObjectPath("log"), now + timedelta(minutes=1)) == [A]

    def test_keeps_odd_names_apart(self, store: ObjectStorage) -> None:
        paths = [ObjectPath(name) for name in ("a b/c", "a%20b/c", "a+b/c", "ü/'q'", "x=1/y#z", "a?b")]
        for path in paths:
            assert store.create(path, path.encode()) is Creation.CREATED
        assert store.read(paths) == [path.encode() for path in paths]

    def test_what_is_below_a_prefix_is_not_elsewhere(self, store: ObjectStorage) -> None:
        left, right = store.below("left"), store.below("right")
        left.create(A, b"left")
        right.create(B, b"right")
        assert left.read([A, B]) == [b"left", None]
        assert right.names(ObjectPath("log")) == [B]
        assert left.url == f"{store.url}/left"
        assert store.read([ObjectPath(f"left/{A}")]) == [b"left"]

    def test_one_of_many_writers_wins(self, store: ObjectStorage) -> None:
        outcomes: dict[int, Creation] = {}
        barrier = threading.Barrier(8)

        def write(number: int) -> None:
            barrier.wait()
            outcomes[number] = store.create(A, str(number).encode())

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [winner] = [number for number, outcome in outcomes.items() if outcome is Creation.CREATED]
        assert store.read([A]) == [str(winner).encode()]


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, memory_store: ObjectStorage) -> ObjectStorage:
        return memory_store


class TestLocalDisk(StoreContract):
    @pytest.fixture
    def store(self, local_store: ObjectStorage) -> ObjectStorage:
        return local_store

    def test_a_directory_with_odd_characters_works(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path / "my state % ü"))
        assert store.create(A, b"x") is Creation.CREATED
        assert open_store((tmp_path / "my state % ü").as_uri()).read([A]) == [b"x"]

    def test_what_a_killed_writer_leaves_half_written_is_not_there(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path))
        store.create(A, b"x")
        (tmp_path / "log" / "b.json#1").write_bytes(b"hal")
        assert store.names(ObjectPath("log")) == [A]
        assert store.create(B, b"whole") is Creation.CREATED
        assert store.read([B]) == [b"whole"]

    def test_an_object_and_its_new_folders_survive_a_power_cut(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
        store = open_store(str(tmp_path))
        store.create(ObjectPath("auctions/log/1"), b"x")
        new = ["auctions/log/1", "auctions/log", "auctions", ""]
        assert flushed == [str(tmp_path / path) for path in new]
        flushed.clear()
        store.create(ObjectPath("auctions/log/2"), b"x")
        assert flushed == [str(tmp_path / path) for path in ("auctions/log/2", "auctions/log")]

    def test_a_fault_of_the_disk_is_a_storage_error_that_names_the_object(self, tmp_path: Path) -> None:
        store = open_store(str(tmp_path))
        (tmp_path / "log").write_text("a file where a directory should be")
        with pytest.raises(StorageError, match=rf"^could not write {tmp_path}/log/a.json: .*directory") as raised:
            store.create(A, b"x")
        assert "\n" not in str(raised.value)


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, s3_store: ObjectStorage) -> ObjectStorage:
        return s3_store

    def test_a_bucket_that_does_not_exist_is_a_storage_error(self, s3_options: dict[str, Any]) -> None:
        store = open_store("s3://nobody-made-this/state", s3_options)
        with pytest.raises(StorageError, match=r"could not write s3://nobody-made-this/state/log/a.json"):
            store.create(A, b"x")

    def test_a_server_that_is_away_is_a_storage_error(self, s3_options: dict[str, Any]) -> None:
        away = {**s3_options, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
        with pytest.raises(StorageError, match=r"could not read s3://bucket/state/log/a.json") as raised:
            open_store("s3://bucket/state", away).read([A])
        assert "test" not in str(raised.value).replace("latest", "")


class TestOpening:
    def test_takes_a_relative_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_store(".arroyo").url == str(tmp_path / ".arroyo")

    @pytest.mark.parametrize(
        "url", ["ftp://host/x", "http://host/x", "hdfs://name/x", "s3:/bucket/x", "file:x", "s3:x"]
    )
    def test_refuses_what_is_neither_a_directory_nor_a_url_that_it_knows(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"'{url}' is neither a directory nor a URL that begins with"):
            open_store(url)

    def test_refuses_a_local_url_with_a_host(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'file://state/x' names a host: a local URL has three slashes"):
            open_store("file://state/x")

    def test_refuses_an_option_that_there_is_not(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'s3://bucket/x' cannot be opened: .*colour"):
            open_store("s3://bucket/x", {"colour": "red"})

    def test_refuses_what_it_cannot_make_a_directory_of(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(ConfigurationError, match=rf"{tmp_path}/file/state cannot be made: Not a directory"):
            open_store(str(tmp_path / "file" / "state"))

    def test_refuses_a_directory_that_cannot_be_written_to(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory).chmod(0o555)
            with (
                as_an_ordinary_user(),
                pytest.raises(ConfigurationError, match="cannot be written to: change its permissions"),
            ):
                open_store(directory)


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Root may write everywhere, so become nobody for a moment."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)
