"""What is shown of an epoch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.engine import Engine
from arroyo_dagster.model import Manifest
from arroyo_dagster.orchestration.epochs import VERIFIED
from arroyo_dagster.orchestration.metadata import KEYS, Timings, metadata_of
from tests.orchestration.helpers import ASSETS, deployment_of, pipeline_in, take

TIMINGS = Timings(1234, 56, 7)
PLAIN = (dg.IntMetadataValue, dg.FloatMetadataValue)
OTHERS = {
    "barrier": dg.TimestampMetadataValue,
    "watermark": dg.TimestampMetadataValue,
    "subtasks": dg.TableMetadataValue,
    "barrier_way": dg.MarkdownMetadataValue,
}


def problems_of(metadata: Mapping[str, Any]) -> list[str]:
    """What is wrong with the metadata of a materialization: keys that nobody explains, numbers that do not plot."""
    problems = []
    for key, value in metadata.items():
        if key.startswith("dagster/"):
            continue
        name = key.removeprefix("arroyo/")
        if name == key or (name not in KEYS and not name.startswith("metric/")):
            problems.append(f"nobody says what {key} is")
        elif not isinstance(value, OTHERS.get(name, PLAIN)):
            problems.append(f"{key} is {type(value).__name__}")
    return problems


@pytest.fixture
def epoch(tmp_path: Path) -> tuple[dict[str, Any], Manifest]:
    """The metadata of every asset of a second epoch, and its manifest."""
    pipeline = pipeline_in(tmp_path)
    take(pipeline, 2)
    manifest = Engine(pipeline).manifest(2)
    return {node.name: metadata_of(node, manifest, TIMINGS) for node in deployment_of(pipeline).nodes}, manifest


def test_every_key_is_explained_and_every_explained_key_occurs(epoch: tuple[dict[str, Any], Manifest]) -> None:
    metadata, _ = epoch
    assert set(metadata) == set(ASSETS)
    for name, values in metadata.items():
        materialization = dg.AssetMaterialization(name, metadata=values)  # as Dagster takes it
        assert problems_of(materialization.metadata) == []
    found = {key.removeprefix("arroyo/") for values in [*metadata.values(), VERIFIED] for key in values}
    assert {key for key in KEYS if "<" not in key} <= found
    assert "metric/rows seen" in found


def test_numbers_are_plain(epoch: tuple[dict[str, Any], Manifest]) -> None:
    metadata, _ = epoch
    for values in metadata.values():
        for key, value in values.items():
            assert type(value) in {int, float} or key.removeprefix("arroyo/") in OTHERS, key


def test_numbers_are_those_of_the_manifest(epoch: tuple[dict[str, Any], Manifest]) -> None:
    metadata, manifest = epoch
    totals, stats, raw = metadata["totals"], metadata["stats"], metadata["raw"]
    [record] = [record for record in manifest.operators if record.operator == "totals"]
    files = [file for table in manifest.tables if table.operator == "totals" for file in table.files]
    own = [file for file in files if "epochs/00000000000000000002/" in file.path]
    assert (totals["arroyo/epoch"], totals["arroyo/attempt"], totals["arroyo/parent"]) == (2, 1, 1)
    assert totals["arroyo/rows_in"] == record.rows_in == 40
    assert totals["arroyo/rows_out"] == record.rows_out
    assert totals["arroyo/state_files"] == len(files)
    assert totals["arroyo/state_bytes"] == sum(file.bytes for file in files)
    assert totals["arroyo/delta_rows"] == sum(file.rows for file in own) > 0
    assert totals["arroyo/metric/rows seen"] == 40
    assert raw["arroyo/rows_out"] == raw["dagster/partition_row_count"] == 40
    assert raw["arroyo/publish_ms"] == 7
    assert (totals["arroyo/epoch_ms"], totals["arroyo/commit_ms"]) == (1234, 56)
    assert stats["arroyo/watermark_lag_s"] > 0
    assert metadata["stats_late"]["arroyo/rows_out"] == stats["arroyo/late_rows"]
    rows = totals["arroyo/subtasks"].records
    assert [row.data["subtask"] for row in rows] == [0, 1]
    assert sum(row.data["rows_in"] for row in rows) == 40


def test_what_only_a_run_knows_is_left_out_where_there_was_none(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    take(pipeline)
    manifest = Engine(pipeline).manifest(1)
    for node in deployment_of(pipeline).nodes:
        assert not {"arroyo/epoch_ms", "arroyo/commit_ms", "arroyo/publish_ms"} & set(metadata_of(node, manifest))


def test_a_node_that_an_old_epoch_did_not_have_shows_only_what_there_is(tmp_path: Path) -> None:
    """A manifest may be older than an operator or a sink, or be of one that had no event time."""
    pipeline = pipeline_in(tmp_path)
    take(pipeline)
    old = replace(Engine(pipeline).manifest(1), operators=(), tables=(), staged=(), spans=())
    for node in deployment_of(pipeline).nodes:
        metadata = metadata_of(node, old)
        assert problems_of(dg.AssetMaterialization(node.name, metadata=metadata).metadata) == []
        assert metadata["arroyo/epoch"] == 1
        assert metadata.get("arroyo/state_rows", 0) == metadata.get("arroyo/files", 0) == 0
        assert "arroyo/watermark" not in metadata
        assert "arroyo/barrier_way" not in metadata
