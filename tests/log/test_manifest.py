"""Manifests: what is written is read back, and nothing else is taken for it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster.errors import DamagedObjectError, NewerFormatError
from arroyo_dagster.log import names
from arroyo_dagster.log.documents import pack_manifest, unpack_manifest
from arroyo_dagster.model import Manifest
from tests.log.test_documents import altered

GOLDEN = Path(__file__).parent / "golden" / "v1" / "auctions" / "epochs" / f"{7:020d}" / "attempt-1" / "manifest.json"
WHERE = "s3://bucket/auctions/manifest.json"


@settings(max_examples=50, deadline=None)
@given(st.builds(Manifest))
def test_a_manifest_survives_the_round_trip(manifest: Manifest) -> None:
    assert unpack_manifest(pack_manifest(manifest), WHERE) == manifest


class TestGolden:
    """Version 1, as it was written once. This file never changes, and is readable for ever."""

    def manifest(self) -> Manifest:
        return unpack_manifest(GOLDEN.read_bytes(), str(GOLDEN))

    def test_lies_where_manifests_lie(self) -> None:
        assert str(GOLDEN).endswith(f"auctions/{names.manifest(7, 1)}")

    def test_is_written_the_same_today(self) -> None:
        assert pack_manifest(self.manifest()) == GOLDEN.read_bytes()

    def test_has_every_field_filled(self) -> None:
        def check(value: Any, path: str) -> None:
            if isinstance(value, tuple | list):
                assert value, path
            if isinstance(value, tuple):
                for item in value:
                    check(item, path)
            if dataclasses.is_dataclass(value):
                for field in dataclasses.fields(value):
                    check(getattr(value, field.name), f"{path}.{field.name}")

        manifest = self.manifest()
        check(manifest, "manifest")
        assert set(manifest.plan.sources) == {"bids", "people"}
        assert {file.times is None for file in manifest.files} == {True, False}
        assert {file.key_groups is None for file in manifest.files} == {True, False}

    def test_says_what_it_said(self) -> None:
        manifest = self.manifest()
        assert (manifest.epoch, manifest.attempt, manifest.parent) == (7, 1, 6)
        assert [table.table for table in manifest.tables] == ["windows", "totals", "rates"]
        assert [file.path for file in manifest.files] == [
            "epochs/00000000000000000007/attempt-1/bid_stats/windows/0-a1b2c3d4e5f60718-0.parquet",
            "epochs/00000000000000000005/attempt-2/bid_stats/windows/1-0718a1b2c3d4e5f6-0.parquet",
            "epochs/00000000000000000007/attempt-1/people/totals/0-a1b2c3d4e5f60718-0.parquet",
            "epochs/00000000000000000002/attempt-1/people/rates/0-a1b2c3d4e5f60718-0.parquet",
        ]
        assert sum(file.rows for file in manifest.files) == 4321
        assert manifest.staged[0].sink == "hot_auctions"
        assert manifest.operators[0].late_rows == 3
        assert manifest.sources[1].watermark is None


class TestRefuses:
    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"colour": "red"}, "unknown field 'colour'"),
            ({"tables": ...}, "missing field 'tables'"),
            ({"spans": ...}, "missing field 'spans'"),
            ({"attempt": "1"}, r"Manifest.attempt: '1' is not of type int"),
            ({"tables": [{"operator": "x", "table": "t"}]}, r"Manifest.tables.*missing field 'files'"),
            ({"parent": None}, r"Manifest.parent: None is not of type int"),
            ({"version": 0}, "format version is 0"),
        ],
    )
    def test_what_the_format_does_not_say(self, changes: dict[str, Any], complaint: str) -> None:
        with pytest.raises(DamagedObjectError, match=complaint) as raised:
            unpack_manifest(altered(GOLDEN.read_bytes(), **changes), WHERE)
        assert str(raised.value).startswith(f"{WHERE} ")

    def test_a_file_outside_of_the_pipeline(self) -> None:
        tables = json.loads(GOLDEN.read_bytes())["tables"]
        tables[0]["files"][0]["path"] = "../people/secrets.parquet"
        with pytest.raises(DamagedObjectError, match=r"manifest.json .*path: .*not a plain name"):
            unpack_manifest(altered(GOLDEN.read_bytes(), tables=tables), WHERE)

    def test_a_newer_version(self) -> None:
        with pytest.raises(NewerFormatError, match=rf"^{WHERE} has format 2, .* upgrade"):
            unpack_manifest(altered(GOLDEN.read_bytes(), version=2), WHERE)

    def test_truncated_and_flipped_bytes(self) -> None:
        data = GOLDEN.read_bytes().rstrip()
        for place in range(0, len(data), 7):
            flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            for damaged in (data[:place], flipped):
                with pytest.raises((DamagedObjectError, NewerFormatError), match=rf"^{WHERE} "):
                    unpack_manifest(damaged, WHERE)
