"""Stored documents: what is written is read back, and nothing else is taken for it."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given

from arroyo_dagster.errors import DamagedObjectError, NewerFormatError
from arroyo_dagster.log import Log, PipelineState, documents, open_store
from arroyo_dagster.log.documents import pack_entry, pack_snapshot, unpack_entry, unpack_snapshot
from arroyo_dagster.log.entries import CheckpointCompleted, CleanupCompleted, Entry, EpochPinned, Fact
from arroyo_dagster.model import EpochSet, ObjectPath
from tests.facts import NOON
from tests.strategies import entries

PINNED = Entry(7, "ann/1", NOON, EpochPinned(3, "before the move"))


def altered(data: bytes, **changes: Any) -> bytes:
    """Change fields of a document and give it the checksum that it would have."""
    body = json.loads(data) | changes
    body = {name: value for name, value in body.items() if value is not ...}
    del body["checksum"]
    return json.dumps(body | {"checksum": documents._checksum(body)}).encode()


@given(entries)
def test_an_entry_survives_the_round_trip(entry: Entry) -> None:
    assert unpack_entry(pack_entry(entry), entry.sequence, "x") == entry


def test_an_entry_is_plain_json_with_its_fields_beside_the_envelope() -> None:
    assert json.loads(pack_entry(PINNED)) == {
        "version": 1,
        "sequence": 7,
        "writer": "ann/1",
        "timestamp": "2026-11-18T12:00:00+00:00",
        "entry": "EpochPinned",
        "epoch": 3,
        "label": "before the move",
        "checksum": "d7e73981ca3edb92978926ab8581cb6c",
    }


class TestRefuses:
    def read(self, data: bytes) -> None:
        unpack_entry(data, 7, "s3://bucket/p/log/7.json")

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"colour": "red"}, "unknown field 'colour'"),
            ({"label": ...}, "missing field 'label'"),
            ({"writer": ...}, "no field 'writer'"),
            ({"label": 5}, r"EpochPinned.label: 5 is not of type str"),
            ({"epoch": True}, r"EpochPinned.epoch: True is not of type int"),
            ({"epoch": "3"}, r"'3' is not of type int"),
            ({"epoch": 3.0}, r"3.0 is not of type int"),
            ({"writer": 5}, "5 is not of type str"),
            ({"timestamp": "yesterday"}, "Invalid isoformat"),
            ({"timestamp": "2026-11-18T12:00:00"}, "not a UTC timestamp"),
            ({"timestamp": "2026-11-18T12:00:00+02:00"}, "not a UTC timestamp"),
            ({"entry": "EpochPainted"}, "no entry of type 'EpochPainted'"),
            ({"sequence": 7.0}, "7.0 is not of type int"),
            ({"sequence": 8}, "misplaced: it holds entry 8"),
            ({"version": 0}, "format version is 0"),
            ({"version": "1"}, "format version is '1'"),
            ({"version": ...}, "format version is None"),
        ],
    )
    def test_what_the_format_does_not_say(self, changes: dict[str, Any], complaint: str) -> None:
        with pytest.raises(DamagedObjectError, match=complaint) as raised:
            self.read(altered(pack_entry(PINNED), **changes))
        assert str(raised.value).startswith("s3://bucket/p/log/7.json ")

    def test_a_newer_version(self) -> None:
        with pytest.raises(NewerFormatError, match=r"^s3://bucket/p/log/7.json has format 2, .* upgrade"):
            self.read(altered(pack_entry(PINNED), version=2))

    @pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"PAR1", b"[1]", b'"x"', b"null", b"[" * 100_000])
    def test_a_foreign_file(self, data: bytes) -> None:
        with pytest.raises(DamagedObjectError, match=r"^s3://bucket/p/log/7.json is "):
            self.read(data)

    def test_every_truncation(self) -> None:
        data = pack_entry(PINNED).rstrip()
        for length in range(len(data)):
            with pytest.raises(DamagedObjectError, match=r"^s3://bucket/p/log/7.json "):
                self.read(data[:length])

    def test_every_flipped_bit(self) -> None:
        data = pack_entry(PINNED).rstrip()
        for position in range(len(data) * 8):
            flipped = bytearray(data)
            flipped[position // 8] ^= 1 << position % 8
            with pytest.raises((DamagedObjectError, NewerFormatError), match=r"^s3://bucket/p/log/7.json "):
                self.read(bytes(flipped))

    @pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "epochs/../../other/x", "", "a//b"])
    def test_a_path_that_leaves_the_prefix(self, path: str) -> None:
        entry = Entry(7, "w", NOON, CheckpointCompleted(3, 1, ObjectPath("epochs/3/manifest.json")))
        with pytest.raises(DamagedObjectError, match=r"log/7.json .*CheckpointCompleted.manifest: .*not a plain name"):
            self.read(altered(pack_entry(entry), manifest=path))

    def test_a_path_that_leaves_the_prefix_among_others(self) -> None:
        entry = Entry(7, "w", NOON, CleanupCompleted(3, 1, 1, (ObjectPath("a"),)))
        with pytest.raises(DamagedObjectError, match=r"CleanupCompleted.undeleted: .*not a plain name"):
            self.read(altered(pack_entry(entry), undeleted=["a", "../b"]))

    def test_a_value_that_its_own_type_rejects(self) -> None:
        barrier = {"epoch": 0, "min_epoch": 0, "timestamp": "2026-11-18T12:00:00+00:00", "then_stop": False}
        fields = {"barrier": barrier, "attempt": 1, "parent": 0, "plan": {"sources": {}}, "run_id": None}
        with pytest.raises(DamagedObjectError, match=r"CheckpointStarted.barrier: .*epoch starts at 1"):
            self.read(altered(pack_entry(PINNED), entry="CheckpointStarted", epoch=..., label=..., **fields))


@pytest.mark.parametrize("epoch", ["1_0", " 10", "010", "ten", "\u0661\u0660"])
def test_a_number_that_is_written_otherwise_is_refused(epoch: str) -> None:
    data = altered(pack_snapshot(PipelineState()), retried={epoch: 2})
    with pytest.raises(DamagedObjectError, match=r"^snapshot is not a valid PipelineState: PipelineState.retried"):
        unpack_snapshot(data, 0, "snapshot")


class TestGolden:
    """Version 1, as it was written once. These files never change, and are readable for ever."""

    directory = Path(__file__).parent / "golden" / "v1" / "auctions"

    def entries(self) -> list[Entry]:
        files = sorted((self.directory / "log").iterdir())
        return [unpack_entry(file.read_bytes(), int(file.stem), str(file)) for file in files]

    def test_has_every_kind_of_entry(self) -> None:
        assert {type(entry.fact) for entry in self.entries()} == set(get_args(Fact))

    def test_is_written_the_same_today(self) -> None:
        for entry in self.entries():
            assert pack_entry(entry) == (self.directory / "log" / f"{entry.sequence:020d}.json").read_bytes()

    def test_its_snapshot_is_read_and_written_the_same_today(self) -> None:
        [file] = (self.directory / "snapshots").iterdir()
        state = unpack_snapshot(file.read_bytes(), int(file.stem), str(file))
        assert state != PipelineState()
        assert pack_snapshot(state) == file.read_bytes()

    def test_the_whole_log_is_read_back_with_and_without_its_snapshot(self, tmp_path: Path) -> None:
        shutil.copytree(self.directory, tmp_path / "auctions")
        read = Log(open_store(str(tmp_path)).below("auctions"), "reader").read()
        shutil.rmtree(tmp_path / "auctions" / "snapshots")
        assert Log(open_store(str(tmp_path)).below("auctions"), "reader").read() == read
        assert (read.sequence, read.head, read.live) == (44, 6, EpochSet.of([2, 3, 6]))
