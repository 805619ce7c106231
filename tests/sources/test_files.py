"""Files that appear in a directory or a bucket: each is read, once, whatever it is called and whenever it comes."""

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import from_url

from arroyo_dagster.dataflow.source import Offsets, ReadReport, Split
from arroyo_dagster.errors import ConfigurationError, DamagedObjectError, NewerFormatError, StorageError
from arroyo_dagster.model import JsonValue
from arroyo_dagster.sources import FileSource
from arroyo_dagster.sources.seen import Limits, SeenFiles, choose
from arroyo_dagster.sources.storage import InputFile
from tests.sources.helpers import ID, NOW, next_paths, parquet_bytes, paths, read, write


class TestFinding:
    """Which files an epoch reads."""

    def test_an_empty_directory_has_nothing_new(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path)
        assert source.latest(None, NOW) == Offsets(None)
        assert source.splits(None, None) == []
        assert source.schema is None
        assert source.schema_at(None) is None

    def test_each_file_is_read_once(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path)
        write(tmp_path, "b.parquet", [1, 2])
        first = source.latest(None, NOW)
        assert read(source, None, first.end).column("id").to_pylist() == [1, 2]
        assert source.latest(first.end, NOW) == Offsets(first.end)
        write(tmp_path, "c.parquet", [3])
        second = source.latest(first.end, NOW)
        assert read(source, first.end, second.end).column("id").to_pylist() == [3]
        assert read(source, None, first.end).column("id").to_pylist() == [1, 2]  # a replay
        assert not second.backlog

    def test_a_late_file_is_read_however_old_and_however_named(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path)
        write(tmp_path, "m.parquet", modified=1_700_000_000)
        first = source.latest(None, NOW)
        write(tmp_path, "a.parquet", modified=1_000_000_000)
        assert next_paths(source, first.end)[0] == ["a.parquet"]

    def test_a_file_that_is_touched_or_deleted_is_not_read_again(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path)
        path = write(tmp_path, "a.parquet", modified=1_000_000_000)
        first = source.latest(None, NOW)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert source.latest(first.end, NOW) == Offsets(first.end)
        path.unlink()
        assert source.latest(first.end, NOW) == Offsets(first.end)

    def test_folders_are_searched_and_hidden_names_are_not(self, tmp_path: Path) -> None:
        for name in (
            "a.parquet", "year=2025/month=1/b.parquet", "_c.parquet", ".d.parquet", "_tmp/e.parquet", "x/.y/f.parquet",
            "x/_temporary/0/g.parquet", "h.parquet.crc", "i.csv", "x/j_.parquet",
        ):  # fmt: skip
            write(tmp_path, name)
        assert next_paths(FileSource(tmp_path), None)[0] == [
            "a.parquet",
            "x/j_.parquet",
            "year=2025/month=1/b.parquet",
        ]

    def test_odd_names_are_no_trouble(self, tmp_path: Path) -> None:
        names = [
            "a b.parquet", "a%20b.parquet", "100%.parquet", "ü/ß.parquet", "👩‍🚀.parquet", "[x]*?.parquet", "#.parquet",
            "a\\b.parquet", "'q' \"r\".parquet", "a+b&c=d.parquet", "\u00a0.parquet",
        ]  # fmt: skip
        for number, name in enumerate(names):
            write(tmp_path, name, [number])
        source = FileSource(tmp_path)
        end = source.latest(None, NOW).end
        assert paths(source, None, end) == sorted(names)
        assert sorted(read(source, None, end).column("id").to_pylist()) == list(range(len(names)))

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [("b*.parquet", ["b1.parquet"]), (["a?.parquet", "*.pq"], ["a1.parquet", "x/c.pq"]), ("*.csv", [])],
    )
    def test_a_pattern_narrows_the_names(self, tmp_path: Path, pattern: Any, expected: list[str]) -> None:
        for name in ("a1.parquet", "b1.parquet", "x/c.pq", "b/c.parquet"):
            write(tmp_path, name)
        source = FileSource(tmp_path, pattern=pattern)
        assert next_paths(source, None)[0] == expected

    def test_an_epoch_takes_the_oldest_files_first(self, tmp_path: Path) -> None:
        for name, modified in (("a", 30), ("b", 10), ("c", 20), ("d", 10)):
            write(tmp_path, f"{name}.parquet", modified=modified)
        source = FileSource(tmp_path, max_files_per_epoch=3)
        first, offsets = next_paths(source, None)
        assert (first, offsets.backlog) == (["b.parquet", "c.parquet", "d.parquet"], True)
        second, offsets = next_paths(source, offsets.end)
        assert (second, offsets.backlog) == (["a.parquet"], False)

    def test_an_epoch_takes_so_many_bytes_but_at_least_one_file(self, tmp_path: Path) -> None:
        sizes = [write(tmp_path, f"{at}.parquet", modified=at).stat().st_size for at in range(3)]
        assert next_paths(FileSource(tmp_path, max_bytes_per_epoch=1), None)[0] == ["0.parquet"]
        exact = FileSource(tmp_path, max_bytes_per_epoch=sizes[0] + sizes[1])
        assert next_paths(exact, None)[0] == ["0.parquet", "1.parquet"]
        less = FileSource(tmp_path, max_bytes_per_epoch=sizes[0] + sizes[1] - 1)
        assert next_paths(less, None)[0] == ["0.parquet"]

    def test_a_split_weighs_as_much_as_its_file(self, tmp_path: Path) -> None:
        size = write(tmp_path, "a.parquet").stat().st_size
        source = FileSource(tmp_path)
        [split] = source.splits(None, source.latest(None, NOW).end)
        assert split.weight == size

    def test_a_directory_by_url_and_by_relative_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "a b", "a.parquet")
        assert next_paths(FileSource(f"file://{tmp_path}/a%20b/"), None)[0] == ["a.parquet"]
        monkeypatch.chdir(tmp_path)
        relative = FileSource("a b")
        monkeypatch.chdir("/")
        assert next_paths(relative, None)[0] == ["a.parquet"]

    def test_the_offset_stays_small_and_is_json(self) -> None:
        found = [
            InputFile(f"day=2025-01-{at % 28:02}/part-{at:05}.parquet", 1000 + at, at * 10**6) for at in range(5_000)
        ]
        end = choose(SeenFiles(schema=ID), found, Limits(), 10**9).seen
        text = json.dumps(end.to_json())
        assert len(text) < 20 * len(found)
        assert SeenFiles.from_json(json.loads(text)) == end

    def test_an_offset_of_a_newer_release_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NewerFormatError, match="version 2: upgrade"):
            FileSource(tmp_path).latest({"version": 2}, NOW)
        with pytest.raises(DamagedObjectError, match="not one of a file source"):
            FileSource(tmp_path).latest({"events": 2}, NOW)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 9)), max_size=6), min_size=1, max_size=6),
    max_files=st.none() | st.integers(1, 4),
    max_bytes=st.none() | st.integers(1, 20),
)
def test_every_file_is_read_exactly_once_in_whatever_order_they_arrive(
    arrivals: list[list[tuple[int, int]]], max_files: int | None, max_bytes: int | None
) -> None:
    limits = Limits(max_files, max_bytes)
    found: dict[str, InputFile] = {}
    offset: JsonValue = None
    read_paths: list[str] = []
    backlog = False
    while arrivals or backlog:
        for modified, size in arrivals.pop() if arrivals else []:
            name = f"{(modified * 7919 + size) % 1000}"
            found.setdefault(name, InputFile(name, size, modified * 10**6))
        seen = SeenFiles.from_json(offset)
        choice = choose(seen, list(found.values()), limits, 1_000)
        assert choice.files or not found.keys() - seen.files.keys()
        assert len(choice.files) <= (max_files or len(found))
        assert len(choice.files) <= 1 or max_bytes is None or sum(file.size for file in choice.files) <= max_bytes
        offset, backlog = choice.seen.to_json(), choice.backlog
        new = SeenFiles.from_json(offset).files.keys() - seen.files.keys()
        assert new == {file.path for file in choice.files}
        read_paths += new
    assert sorted(read_paths) == sorted(found)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 3))
def test_every_row_of_a_directory_is_read_exactly_once(order: list[int], max_files: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, source = Path(name), FileSource(name, max_files_per_epoch=max_files)
        ids: list[int] = []
        start: JsonValue = None
        for step in range(12):
            if step < len(order):
                write(directory, f"{order[step]}.parquet", [order[step]], modified=1_000 * order[step])
            offsets = source.latest(start, NOW)
            ids += read(source, start, offsets.end).column("id").to_pylist() if offsets.end != start else []
            start = offsets.end
        assert sorted(ids) == list(range(6))
        assert not offsets.backlog


class TestForgetting:
    """What `forget_after` gives up, and what it does not."""

    @staticmethod
    def remembered(end: JsonValue) -> list[str]:
        return sorted(SeenFiles.from_json(end).files)

    def test_old_files_are_neither_remembered_nor_read(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path, forget_after="100 seconds")
        end: JsonValue = None
        for at in (0, 50, 200, 250):
            write(tmp_path, f"{at}.parquet", modified=1_000_000 + at)
            found, offsets = next_paths(source, end)
            assert found == [f"{at}.parquet"]
            end = offsets.end
        assert self.remembered(end) == ["200.parquet", "250.parquet"]
        write(tmp_path, "late.parquet", modified=1_000_120)
        assert source.latest(end, NOW) == Offsets(end)
        write(tmp_path, "in time.parquet", modified=1_000_150)
        assert next_paths(source, end)[0] == ["in time.parquet"]

    def test_the_first_epoch_reads_everything_once(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path, forget_after="100 seconds")
        for at in (0, 500, 1_000):
            write(tmp_path, f"{at}.parquet", modified=1_000_000 + at)
        found, offsets = next_paths(source, None)
        assert found == ["0.parquet", "1000.parquet", "500.parquet"]
        assert source.latest(offsets.end, NOW) == Offsets(offsets.end)
        write(tmp_path, "1001.parquet", modified=1_001_001)
        found, offsets = next_paths(source, offsets.end)
        assert found == ["1001.parquet"]
        assert self.remembered(offsets.end) == ["1000.parquet", "1001.parquet"]
        assert source.latest(offsets.end, NOW) == Offsets(offsets.end)

    @pytest.mark.parametrize("longer", ["1 day", None])
    def test_remembering_for_longer_does_not_read_again(self, tmp_path: Path, longer: str | None) -> None:
        short = FileSource(tmp_path, forget_after="100 seconds")
        end: JsonValue = None
        for at in (0, 500, 1_000):
            write(tmp_path, f"{at}.parquet", modified=1_000_000 + at)
            end = short.latest(end, NOW).end
        assert self.remembered(end) == ["1000.parquet", "500.parquet"]
        assert FileSource(tmp_path, forget_after=longer).latest(end, NOW) == Offsets(end)

    def test_a_touched_file_is_not_forgotten_while_it_looks_new(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path, forget_after="100 seconds")
        end: JsonValue = None
        old = write(tmp_path, "old.parquet", modified=1_000_000)
        for at in (500, 1_000, 1_050, 1_090):
            write(tmp_path, f"{at}.parquet", modified=1_000_000 + at)
            found, offsets = next_paths(source, end)
            assert "old.parquet" not in found or end is None
            end = offsets.end
            os.utime(old, (1_000_000 + at, 1_000_000 + at))

    def test_a_file_from_the_future_does_not_make_others_forgotten(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path, forget_after="1 day")
        write(tmp_path, "future.parquet", modified=NOW.add(years=10).int_timestamp)
        _, offsets = next_paths(source, None)
        write(tmp_path, "today.parquet", modified=NOW.subtract(hours=1).int_timestamp)
        found, offsets = next_paths(source, offsets.end)
        assert found == ["today.parquet"]
        assert source.latest(offsets.end, NOW.add(days=3)) == Offsets(offsets.end)


class TestRefusing:
    """Sources that cannot be."""

    def test_a_missing_directory_is_not_made(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path / "none")
        with pytest.raises(ConfigurationError, match="none is not a directory: make it, or correct"):
            source.latest(None, NOW)
        assert not (tmp_path / "none").exists()
        file = write(tmp_path, "a.parquet")
        with pytest.raises(ConfigurationError, match=r"a\.parquet is not a directory: name the directory"):
            FileSource(file).latest(None, NOW)

    def test_a_directory_needs_no_right_to_write(self, tmp_path: Path) -> None:
        write(tmp_path, "a.parquet")
        tmp_path.chmod(0o555)
        try:
            assert next_paths(FileSource(tmp_path), None)[0] == ["a.parquet"]
        finally:
            tmp_path.chmod(0o755)

    def test_what_is_not_its_own_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path, "a.parquet")
        source = FileSource(tmp_path)
        [split] = source.splits(None, source.latest(None, NOW).end)
        with pytest.raises(ConfigurationError, match="has no column 'nope': there are id"):
            list(source.read(split, ["nope"], ReadReport()))
        with pytest.raises(ConfigurationError, match="is not a split of a file source"):
            list(source.read(Split(7), None, ReadReport()))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"url": ""}, "needs the url of a directory"),
            ({"url": "file://host/in"}, "names a host"),
            ({"format": "avro"}, "its format is one of parquet, json, csv, not 'avro'"),
            ({"format": "json"}, "json files do not tell their types, so give it a schema"),
            ({"format": "csv"}, "csv files do not tell their types, so give it a schema"),
            ({"schema": {"id": "int"}}, "must be a pyarrow.Schema"),
            ({"schema": pa.schema([])}, "its schema has no columns"),
            ({"schema": pa.schema([("a", pa.int8()), ("a", pa.int8())])}, "two columns of one name"),
            (
                {"format": "csv", "schema": pa.schema([("ok", pa.int8()), ("l", pa.list_(pa.int8()))])},
                "csv has no values of type list<.*>, which its schema gives to 'l': take another type",
            ),
            ({"format": "json", "schema": pa.schema([("m", pa.map_(pa.string(), pa.int8()))])}, "gives to 'm'"),
            ({"max_files_per_epoch": 0}, "max_files_per_epoch must be a whole number from 1 on, not 0"),
            ({"max_bytes_per_epoch": 1.5}, "max_bytes_per_epoch must be a whole number from 1 on, not 1.5"),
            ({"on_bad_file": "skip"}, "on_bad_file is 'fail' or 'quarantine', not 'skip'"),
            ({"forget_after": "soon"}, "its forget_after must be a duration such as .* not 'soon'"),
            ({"forget_after": "0 seconds"}, "its forget_after must be a second or more"),
            ({"pattern": "x/*.parquet"}, r"a glob for names without folders, .* not 'x/\*.parquet'"),
            ({"pattern": []}, "a glob for names without folders"),
        ],
    )
    def test_bad_arguments_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            FileSource(**{"url": "in", **options})

    @pytest.mark.parametrize(
        ("url", "message"),
        [("memory://", "nobody can write to"), ("hdfs://host/in", "'hdfs://host/in' cannot be opened")],
    )
    def test_storage_that_is_not_known_is_refused(self, url: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            FileSource(url).latest(None, NOW)


class TestBucket:
    """The same on S3."""

    def test_files_in_a_bucket(self, s3_options: dict[str, Any]) -> None:
        url = "s3://bucket/incoming data"
        bucket = from_url(url, **s3_options)
        names = ["a b.parquet", "x=1/100%.parquet", "ü.parquet", "a%20b.parquet"]
        for number, name in enumerate(names):
            obstore.put(bucket, name, parquet_bytes(id=[number]))
        obstore.put(bucket, "_tmp/c.parquet", b"half")
        obstore.put(from_url("s3://bucket", **s3_options), "incoming data 2/d.parquet", b"not below")
        source: FileSource = pickle.loads(pickle.dumps(FileSource(url, storage_options=s3_options)))  # noqa: S301
        first = source.latest(None, NOW)
        assert paths(source, None, first.end) == sorted(names)
        assert sorted(read(source, None, first.end).column("id").to_pylist()) == [0, 1, 2, 3]
        assert source.latest(first.end, NOW) == Offsets(first.end)
        obstore.put(bucket, "0.parquet", parquet_bytes(id=[4]))
        second = source.latest(first.end, NOW)
        assert read(source, first.end, second.end).to_pylist() == [{"id": 4}]
        bucket.delete("0.parquet")
        with pytest.raises(DamagedObjectError, match=f"{url}/0.parquet has vanished"):
            read(source, first.end, second.end)

    def test_an_empty_prefix_has_nothing_and_a_missing_bucket_is_an_error(self, s3_options: dict[str, Any]) -> None:
        assert FileSource("s3://bucket/nothing", storage_options=s3_options).latest(None, NOW) == Offsets(None)
        with pytest.raises(StorageError, match="could not list s3://no-such-bucket/x"):
            FileSource("s3://no-such-bucket/x", storage_options=s3_options).latest(None, NOW)

    def test_trouble_with_the_storage_is_never_taken_for_a_bad_file(self, s3_options: dict[str, Any]) -> None:
        url = "s3://bucket/unreachable"
        obstore.put(from_url(url, **s3_options), "a.parquet", parquet_bytes(id=[1]))
        good = FileSource(url, storage_options=s3_options, on_bad_file="quarantine")
        [split] = good.splits(None, good.latest(None, NOW).end)
        broken = {**s3_options, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}
        report = ReadReport()
        with pytest.raises(StorageError, match=f"could not read {url}/a.parquet"):
            list(FileSource(url, storage_options=broken, on_bad_file="quarantine").read(split, None, report))
        assert report.quarantined == []
