"""What is in the files: rows that fit the schema, rows that can be made to, and damage."""

import gzip
import json
import os
import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from arroyo_dagster.dataflow.source import ReadReport
from arroyo_dagster.errors import DamagedObjectError
from arroyo_dagster.sources import FileSource, formats
from arroyo_dagster.sources.formats import FORMATS
from tests.sources.helpers import ID, NOW, next_paths, only_row, parquet_bytes, read, write


class TestReading:
    """What becomes of a file's rows."""

    def test_the_first_file_tells_the_schema_for_good(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path)
        table = pa.table({"id": pa.array([1], pa.int32()), "kind": pa.array(["x"]).dictionary_encode()})
        pq.write_table(table.replace_schema_metadata({"made": "by me"}), tmp_path / "a.parquet")
        first = source.latest(None, NOW)
        expected = pa.schema([("id", pa.int32()), ("kind", pa.string())])
        assert source.schema_at(first.end) == expected
        pq.write_table(pa.table({"more": [1.5], "id": pa.array([2], pa.int64())}), tmp_path / "b.parquet")
        second = source.latest(first.end, NOW)
        assert source.schema_at(second.end).equals(expected, check_metadata=True)  # type: ignore[union-attr]
        assert read(source, None, first.end).equals(pa.table([[1], ["x"]], schema=expected))
        assert read(source, first.end, second.end).equals(pa.table([[2], [None]], schema=expected))

    def test_files_are_fitted_to_a_given_schema(self, tmp_path: Path) -> None:
        schema = pa.schema([("price", pa.decimal128(12, 2)), ("at", pa.timestamp("us", "UTC")), ("id", pa.int64())])
        source = FileSource(tmp_path, schema=schema)
        moment = datetime(2025, 1, 1, 12, tzinfo=UTC)
        pq.write_table(
            pa.table(
                {"at": pa.array([moment], pa.timestamp("ms", "Europe/Berlin")), "id": ["7"], "price": [Decimal("3.5")]}
            ),
            tmp_path / "a.parquet",
        )
        end = source.latest(None, NOW).end
        table = read(source, None, end)
        assert (source.schema, source.schema_at(end), table.schema) == (schema, schema, schema)
        assert table.to_pylist() == [{"price": Decimal("3.50"), "at": moment, "id": 7}]

    @pytest.mark.parametrize("columns", [["b"], ["c", "a"], ["missing"], []])
    @pytest.mark.parametrize("kind", FORMATS)
    def test_only_the_columns_that_are_asked_for(self, tmp_path: Path, kind: Any, columns: list[str]) -> None:
        schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.float64()), ("missing", pa.int8())])
        table = pa.table({"a": [1, 2, 3], "b": ["x", None, "z"], "c": [0.5, 1.5, None]})
        WRITERS[kind](table, tmp_path / f"a.{kind}")
        source = FileSource(tmp_path, kind, schema=schema)
        found = read(source, None, source.latest(None, NOW).end, columns)
        expected = table.append_column("missing", pa.nulls(3, pa.int8())).select(columns)
        assert found.num_rows == 3
        assert found.equals(expected)

    def test_large_files_come_in_batches(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"id": range(600_000)}), tmp_path / "a.parquet", row_group_size=250_000)
        for on_bad_file in ("fail", "quarantine"):
            source = FileSource(tmp_path, on_bad_file=on_bad_file)
            [split] = source.splits(None, source.latest(None, NOW).end)
            batches = list(source.read(split, None, ReadReport()))
            assert len(batches) >= 3
            assert pa.Table.from_batches(batches).column("id").to_pylist() == list(range(600_000))

    @pytest.mark.parametrize("kind", FORMATS)
    def test_a_file_without_rows_is_fine(self, tmp_path: Path, kind: Any) -> None:
        if kind == "json":
            (tmp_path / "a.json").write_text("\n")
        else:
            WRITERS[kind](ID.empty_table(), tmp_path / f"a.{kind}")
        source = FileSource(tmp_path, kind, schema=ID)
        found, offsets = next_paths(source, None)
        assert found == [f"a.{kind}"]
        assert read(source, None, offsets.end).num_rows == 0

    @pytest.mark.parametrize("kind", FORMATS)
    def test_every_common_type_survives(self, tmp_path: Path, kind: Any) -> None:
        schema = pa.schema(
            [
                ("flag", pa.bool_()),
                ("small", pa.int8()),
                ("large", pa.uint64()),
                ("real", pa.float64()),
                ("text", pa.string()),
                ("money", pa.decimal128(20, 4)),
                ("day", pa.date32()),
                ("local", pa.timestamp("us")),
                ("instant", pa.timestamp("us", "UTC")),
            ]
        )
        now, then = datetime(2025, 2, 3, 4, 5, 6, 789, UTC), datetime(1960, 1, 1, tzinfo=UTC)
        rows: list[list[Any]] = [
            [
                True,
                -5,
                2**64 - 1,
                0.25,
                'a "q", ü\nx',
                Decimal("1.2500"),
                date(2025, 2, 3),
                now.replace(tzinfo=None),
                now,
            ],
            [None] * 9,
            [False, 0, 0, -1.5, "", Decimal("-0.0001"), date(1960, 1, 1), then.replace(tzinfo=None), then],
        ]
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        WRITERS[kind](table, tmp_path / f"a.{kind}")
        source = FileSource(tmp_path, kind, schema=schema)
        assert read(source, None, source.latest(None, NOW).end).equals(table)

    def test_json_may_nest(self, tmp_path: Path) -> None:
        schema = pa.schema([("s", pa.struct([("day", pa.date32()), ("l", pa.list_(pa.int8()))]))])
        (tmp_path / "a.jsonl").write_text('{"s": {"l": [1, null], "day": "2025-02-03", "x": 1}, "y": {}}\n')
        row = only_row(FileSource(tmp_path, "json", schema=schema))
        assert row == {"s": {"day": date(2025, 2, 3), "l": [1, None]}}

    def test_a_time_of_day_in_csv(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("\ufeffid,at\n1,10:20:30\n", encoding="utf-8")
        schema = pa.schema([("id", pa.int64()), ("at", pa.time64("us"))])
        assert only_row(FileSource(tmp_path, "csv", schema=schema)) == {"id": 1, "at": time(10, 20, 30)}

    def test_csv_may_have_lines_in_a_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "_CSV_BLOCK_BYTES", 64)
        table = pa.table({"text": [f"{at}\n" * (at % 7) for at in range(100)]})
        arrow_csv.write_csv(table, tmp_path / "a.csv")
        source = FileSource(tmp_path, "csv", schema=table.schema)
        assert read(source, None, source.latest(None, NOW).end).to_pylist() == table.to_pylist()

    def test_csv_tells_nothing_from_an_empty_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text('a,b,c\n"",,NA\n')
        schema = pa.schema([(name, pa.string()) for name in "abc"])
        assert only_row(FileSource(tmp_path, "csv", schema=schema)) == {"a": "", "b": None, "c": "NA"}

    @pytest.mark.parametrize("name", ["a.json.gz", "a.ndjson.gz", "a.csv.gz"])
    def test_text_may_be_compressed(self, tmp_path: Path, name: str) -> None:
        text = b"id\n7\n" if "csv" in name else b'{"id": 7}\n'
        (tmp_path / name).write_bytes(gzip.compress(text[:4]) + gzip.compress(text[4:]))
        assert only_row(FileSource(tmp_path, "csv" if "csv" in name else "json", schema=ID)) == {"id": 7}

    def test_a_long_line_of_json_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(json.dumps({"text": "x" * 3_000_000}) + "\n" + json.dumps({"text": "y"}))
        source = FileSource(tmp_path, "json", schema=pa.schema([("text", pa.string())]))
        table = read(source, None, source.latest(None, NOW).end)
        assert [len(text) for text in table.column("text").to_pylist()] == [3_000_000, 1]

    @pytest.mark.parametrize("piece", [1, 12, 1 << 24])
    @pytest.mark.parametrize("text", ['null\n{"id": 1}', '{"id": 1}\n\n null\n', '\ufeff null\n{"id": 1}\r\n'])
    def test_a_bare_null_in_json_is_a_row_of_nulls(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, text: str
    ) -> None:
        monkeypatch.setattr(formats, "_PIECE_BYTES", piece)
        (tmp_path / "a.json").write_text(text, encoding="utf-8", newline="")
        source = FileSource(tmp_path, "json", schema=ID)
        found = read(source, None, source.latest(None, NOW).end).column("id").to_pylist()
        assert sorted(found, key=str) == [1, None]

    @pytest.mark.parametrize("piece", [1, 100, 5_000])
    def test_json_is_read_piece_by_piece(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
        monkeypatch.setattr(formats, "_PIECE_BYTES", piece)
        write_json(pa.table({"id": range(1_000)}), tmp_path / "a.json")
        source = FileSource(tmp_path, "json", schema=ID)
        assert read(source, None, source.latest(None, NOW).end).column("id").to_pylist() == list(range(1_000))

    def test_a_source_is_pickled_to_the_tasks(self, tmp_path: Path) -> None:
        write(tmp_path, "a.parquet", [5])
        source = FileSource(tmp_path)
        end = source.latest(None, NOW).end
        pickled = pickle.dumps(source)
        assert pickled == pickle.dumps(FileSource(tmp_path))  # what it has opened stays behind
        task: FileSource = pickle.loads(pickled)  # noqa: S301
        assert read(task, None, end).to_pylist() == [{"id": 5}]


def write_json(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist()))


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    "parquet": pq.write_table,
    "json": write_json,
    "csv": arrow_csv.write_csv,
}
NOT_NULL = pa.schema([pa.field("id", pa.int64(), nullable=False)])
GOOD_PARQUET = pa.BufferOutputStream()
pq.write_table(
    pa.table({"id": range(1_000)}), GOOD_PARQUET, write_page_checksum=True, use_dictionary=False, compression="none"
)
PARQUET = GOOD_PARQUET.getvalue().to_pybytes()
VALUE = PARQUET.index((777).to_bytes(8, "little"))
FLIPPED = bytes([*PARQUET[:VALUE], PARQUET[VALUE] ^ 1, *PARQUET[VALUE + 1 :]])


BAD_FILES = [
    pytest.param("a.parquet", b"", ID, "", id="parquet of no bytes"),
    pytest.param("a.parquet", PARQUET[:-10], ID, "", id="parquet cut short"),
    pytest.param("a.parquet", FLIPPED, ID, "CRC", id="parquet with a flipped bit"),
    pytest.param(
        "a.parquet", parquet_bytes(id=["x"]), ID, "column 'id' cannot be cast to int64", id="parquet of a wrong type"
    ),
    pytest.param("a.parquet", parquet_bytes(id=[1.5]), ID, "", id="parquet whose cast would lose"),
    pytest.param("a.parquet", parquet_bytes(id=[1, None]), NOT_NULL, "nulls", id="parquet with a forbidden null"),
    pytest.param("a.parquet", parquet_bytes(key=[1]), ID, "none of the schema's columns, id", id="another parquet"),
    pytest.param(
        "a.parquet",
        parquet_bytes(other=[1]),
        pa.schema([*NOT_NULL, ("other", pa.int64())]),
        "'id' has nulls, or is missing",
        id="parquet without a column that must be",
    ),
    pytest.param("a.json", b"", ID, "it is empty", id="json of no bytes"),
    pytest.param("a.json", b'{"id": 1}\n{"id":', ID, "", id="json cut short"),
    pytest.param("a.json", b'{"id": 1}\n{"id": "x"}\n', ID, "", id="json of a wrong type"),
    pytest.param("a.json", b'{"id": 300}\n', pa.schema([("id", pa.int8())]), "300", id="json out of range"),
    pytest.param("a.json", b'[{"id": 1}]\n', ID, "", id="json array"),
    pytest.param("a.json", b'{"id": "\xff"}', pa.schema([("id", pa.string())]), "UTF8", id="json of no text"),
    pytest.param(
        "a.json", b'{"id": "2025-13-01"}', pa.schema([("id", pa.date32())]), "2025-13-01", id="json of no date"
    ),
    pytest.param("a.json.gz", gzip.compress(b'{"id": 1}\n')[:-6], ID, "", id="gzip cut short"),
    pytest.param("a.json.gz", b'{"id": 1}\n', ID, "", id="gzip that is none"),
    pytest.param("a.csv", b"", ID, "none of the schema's columns", id="csv of no bytes"),
    pytest.param("a.csv", b"1\n2\n", ID, "none of the schema's columns", id="csv without a header"),
    pytest.param("a.csv", b"id,id\n1,2\n", ID, "two columns named 'id'", id="csv with a column twice"),
    pytest.param("a.csv", b"id,x\n1,2,3\n", ID, "Expected 2 columns, got 3", id="csv of ragged lines"),
    pytest.param("a.csv", b"id\nx\n", ID, "x", id="csv of a wrong type"),
    pytest.param("a.csv", b"\xff\xfe\nid\n1\n", ID, "", id="csv of no text"),
]


class TestTrouble:
    """Files that cannot be read, or are not what they were."""

    @pytest.mark.parametrize(("name", "data", "schema", "reason"), BAD_FILES)
    def test_a_bad_file_fails_or_is_left_out_as_a_whole(
        self, tmp_path: Path, name: str, data: bytes, schema: pa.Schema, reason: str
    ) -> None:
        (tmp_path / name).write_bytes(data)
        kind: Any = name.split(".")[1]
        failing = FileSource(tmp_path, kind, schema=schema)
        [split] = failing.splits(None, failing.latest(None, NOW).end)
        with pytest.raises(DamagedObjectError) as caught:
            list(failing.read(split, None, ReadReport()))
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}/{name} cannot be read as {kind}: ")
        assert message.endswith('or leave it out with on_bad_file="quarantine"')
        assert reason in message
        assert "\n" not in message
        lenient = FileSource(tmp_path, kind, schema=schema, on_bad_file="quarantine")
        report = ReadReport()
        assert list(lenient.read(split, None, report)) == []
        assert report.quarantined == [f"{tmp_path}/{name}"]

    def test_nothing_of_a_file_that_turns_bad_in_the_middle_gets_through(self, tmp_path: Path) -> None:
        out = pa.BufferOutputStream()
        with pq.ParquetWriter(out, pa.schema([("id", pa.string())])) as writer:
            for at in range(3):
                writer.write_table(pa.table({"id": ["1"] * 200_000 if at < 2 else ["x"]}))
        (tmp_path / "a.parquet").write_bytes(out.getvalue())
        for on_bad_file, expected in (("fail", 262_144), ("quarantine", 0)):
            source = FileSource(tmp_path, schema=ID, on_bad_file=on_bad_file)  # type: ignore[arg-type]
            [split] = source.splits(None, source.latest(None, NOW).end)
            rows = 0
            try:
                for batch in source.read(split, None, ReadReport()):
                    rows += batch.num_rows
            except DamagedObjectError:
                assert on_bad_file == "fail"
            assert rows == expected

    def test_a_bad_first_file_fails_the_plan_and_can_be_mended(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        source = FileSource(tmp_path)
        with pytest.raises(DamagedObjectError, match=r"a\.parquet cannot be read as parquet: .*; put an intact copy"):
            source.latest(None, NOW)
        write(tmp_path, "a.parquet", [9])
        assert read(source, None, source.latest(None, NOW).end).to_pylist() == [{"id": 9}]

    def test_the_first_file_that_can_be_read_tells_the_schema(self, tmp_path: Path) -> None:
        source = FileSource(tmp_path, on_bad_file="quarantine")
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        os.utime(tmp_path / "a.parquet", (1, 1))
        first = source.latest(None, NOW)
        assert source.schema_at(first.end) is None
        [split] = source.splits(None, first.end)
        report = ReadReport()
        assert list(source.read(split, ["id"], report)) == []
        assert report.quarantined == [f"{tmp_path}/a.parquet"]
        write(tmp_path, "b.parquet")
        assert source.schema_at(source.latest(first.end, NOW).end) == ID
        assert source.schema_at(source.latest(None, NOW).end) == ID

    @pytest.mark.parametrize("on_bad_file", ["fail", "quarantine"])
    def test_a_file_that_vanished_or_changed_is_an_error(self, tmp_path: Path, on_bad_file: Any) -> None:
        path = write(tmp_path, "x/a b.parquet")
        source = FileSource(tmp_path, on_bad_file=on_bad_file)
        [split] = source.splits(None, source.latest(None, NOW).end)
        size = path.stat().st_size
        write(tmp_path, "x/a b.parquet", [1, 2, 3, 2**40])
        changed = rf"x/a b\.parquet has changed from {size} to \d+ bytes since .* put it back as it was, or rewind"
        with pytest.raises(DamagedObjectError, match=changed):
            list(source.read(split, None, ReadReport()))
        path.unlink()
        with pytest.raises(DamagedObjectError, match=r"x/a b\.parquet has vanished since .* put it back as it was"):
            list(source.read(split, None, ReadReport()))
