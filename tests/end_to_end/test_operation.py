"""A pipeline in Dagster: its sensor takes epochs, a run is killed, it is stopped, Dagster is lost, it goes on."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from arroyo_dagster.dataflow.source import ReadReport
from arroyo_dagster.sources import NexmarkSource
from tests.end_to_end.project import ASSETS, EVENTS_PER_SECOND, Project
from tests.end_to_end.server import wait_for

CHECKS = {
    "bid_stats": {"aligned", "files_whole", "watermark_monotonic", "state_chain", "replay_identical"},
    "price_records": {"aligned", "files_whole", "watermark_monotonic", "state_chain", "replay_identical"},
    "hot_auctions": {"rows_conserved", "replay_identical"},
    "record_prices": {"rows_conserved", "replay_identical"},
}

# What the pipeline should have come to, from the bids and the epochs in which they were read.
ORACLE = """
    WITH marks AS (
        SELECT epoch, max(max(epoch_us(date_time))) OVER (ORDER BY epoch) - 5_000_000 AS mark FROM bids GROUP BY epoch
    ), windows AS (
        SELECT auction, floor(epoch_us(date_time) / 1e7)::BIGINT * 10_000_000 AS start, count(*) AS bids,
            max(price) AS top_price
        FROM bids WHERE price > 100 GROUP BY ALL
    ), closed AS (
        SELECT auction, start, bids, top_price, min(epoch) AS epoch
        FROM windows JOIN marks ON start + 10_000_000 <= mark GROUP BY ALL
    ), tops AS (SELECT auction, epoch, max(top_price) AS price FROM closed GROUP BY ALL)
    """
HOT_AUCTIONS = "SELECT auction, make_timestamp(start) AS start, bids, top_price FROM closed ORDER BY ALL"
RECORD_PRICES = """
    SELECT auction, price FROM tops QUALIFY price > coalesce(max(price) OVER (
        PARTITION BY auction ORDER BY epoch ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), -1)
    ORDER BY ALL"""


@pytest.mark.timeout(900)
def test_a_pipeline_survives_all_that_happens_to_it(project: Project) -> None:
    the_sensor_alone_took_epochs(project)
    killed = a_killed_run_is_tried_again(project)
    head = it_stops_with_a_last_checkpoint(project)
    assert head > killed
    assert [row["attempt"] for row in project.epochs() if row["epoch"] == killed] == [2]
    the_output_is_what_it_should_be(project)
    a_new_dagster_learns_all_of_it(project, head)
    it_is_resumed(project, head)
    project.server.stop()
    the_output_is_what_it_should_be(project)


def the_sensor_alone_took_epochs(project: Project) -> None:
    assert {run["tags"]["dagster/sensor_name"] for run in project.runs()} == {"auctions_controller"}
    for name in ASSETS:
        asset = project.asset(name)
        events = {int(event["partition"]): event["metadata"] for event in asset["assetMaterializations"]}
        assert set(events) <= set(map(int, asset["partitionKeys"]))
        assert {1, 2, 3} <= set(events)
        assert len(events) == len(asset["assetMaterializations"])
        for epoch, metadata in events.items():
            assert (metadata["arroyo/epoch"], metadata["arroyo/attempt"]) == (epoch, 1)
            assert metadata["arroyo/parent"] == epoch - 1
            assert metadata["arroyo/epoch_ms"] > metadata["arroyo/commit_ms"] >= 0
        checks = {
            check["name"]: check["executionForLatestMaterialization"] for check in asset["assetChecksOrError"]["checks"]
        }
        assert set(checks) == CHECKS[name]
        # The next epoch may have begun meanwhile.
        assert all(check is None or check["status"] in {"SUCCEEDED", "IN_PROGRESS"} for check in checks.values())
        if name in {"bid_stats", "price_records"}:
            assert all(metadata["arroyo/rows_in"] > 0 for metadata in events.values())
            assert all("data:image" in metadata["arroyo/barrier_way"] for metadata in events.values())
    rows_out = {
        event["metadata"]["arroyo/rows_out"] for event in project.asset("hot_auctions")["assetMaterializations"]
    }
    assert max(rows_out) > 0


def a_killed_run_is_tried_again(project: Project) -> int:
    """Kill a run in the middle of its second stage, and return its epoch."""

    def in_its_second_stage() -> dict[str, Any] | None:
        [run] = project.runs(limit=1)
        return run if run["status"] == "STARTED" and run["steps"].get("price_records") == "IN_PROGRESS" else None

    run = wait_for("the second stage of an epoch", in_its_second_stage, 120, every=0.2)
    java = project.server.processes("java")
    assert java
    named = re.fullmatch(r"[^/]+/process-(\d+)-\d+@.+", run["tags"]["arroyo_dagster/process"])
    assert named is not None
    os.kill(int(named[1]), signal.SIGKILL)
    epoch = int(run["tags"]["dagster/partition"])
    wait_for("the end of its Spark", lambda: not set(java) & set(project.server.processes("java")))

    project.wait_for_epoch(epoch, 120)
    [attempt] = [row["attempt"] for row in project.epochs() if row["epoch"] == epoch]
    assert attempt == 2
    for name in ASSETS:
        [event] = [e for e in project.asset(name)["assetMaterializations"] if int(e["partition"]) == epoch]
        assert event["metadata"]["arroyo/attempt"] == 2
        assert event["runId"] != run["runId"]
    wait_for("Dagster to see that the run is dead", lambda: project.run(run["runId"])["status"] == "FAILURE", 90)
    return epoch


def it_stops_with_a_last_checkpoint(project: Project) -> int:
    """Stop it, and return its last epoch."""
    before = max(row["epoch"] for row in project.epochs())
    assert project.launch("auctions_stop")["status"] == "SUCCESS"
    reason = wait_for("the pipeline to rest", lambda: stopped_at(project), 120)
    head: int = max(row["epoch"] for row in project.epochs())
    assert head > before
    assert reason == f"stopped at epoch {head}; resume to go on"
    assert project.tell("show", "auctions", str(head))["manifest"]["barrier"]["then_stop"] is True
    [pipeline] = project.tell("list")["pipelines"]
    assert (pipeline["mode"], pipeline["head"]) == ("stopped", head)
    return head


def stopped_at(project: Project) -> str | None:
    """What the last tick says, if it says that."""
    ticks = project.ticks()
    reason = str(ticks[0]["skipReason"]) if ticks else ""
    return reason if reason.startswith("stopped") else None


def the_output_is_what_it_should_be(project: Project) -> None:
    """Every window and every record is there, and each only once."""
    epochs = project.epochs()
    assert [row["epoch"] for row in epochs] == list(range(1, len(epochs) + 1))
    assert sum(row["late_rows"] for row in epochs) == 0
    end = project.tell("show", "auctions", str(len(epochs)))["manifest"]["plan"]["sources"]["bids"]["end"]
    source = NexmarkSource("bid", events_per_second=EVENTS_PER_SECOND)
    columns = ["auction", "price", "date_time"]
    batches = [batch for split in source.splits(None, end) for batch in source.read(split, columns, ReadReport())]
    numbers = [row["epoch"] for row in epochs for _ in range(row["rows_in"])]
    bids = pa.Table.from_batches(batches).append_column("epoch", pa.array(numbers, pa.int64()))
    delta = DeltaTable(project.directory / "data" / "hot_auctions").to_pyarrow_table()  # noqa: F841 - DuckDB reads it
    parquet = Path(project.directory, "data", "record_prices", "*.parquet")
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("bids", bids)
        windows = connection.execute(ORACLE + HOT_AUCTIONS).fetchall()
        records = connection.execute(ORACLE + RECORD_PRICES).fetchall()
        assert len(windows) > 1000
        assert len(records) > 1000
        shown = "SELECT auction, window_start::TIMESTAMP, bids, top_price FROM delta ORDER BY ALL"
        assert connection.execute(shown).fetchall() == windows
        shown = f"SELECT auction, price FROM '{parquet}' ORDER BY ALL"
        assert connection.execute(shown).fetchall() == records
    assert project.tell("verify", "auctions")["problems"] == []


def a_new_dagster_learns_all_of_it(project: Project, head: int) -> None:
    """Lose everything that Dagster knows."""
    project.server.stop()
    shutil.rmtree(project.server.home)
    project.server.start()
    project.wait_for_epoch(head)
    for name in ASSETS:
        asset = project.asset(name)
        assert list(map(int, asset["partitionKeys"])) == list(range(1, head + 1))
        events = {int(event["partition"]): event["metadata"] for event in asset["assetMaterializations"]}
        assert list(events) == list(range(head, 0, -1))
        assert all(metadata["arroyo/epoch"] == epoch for epoch, metadata in events.items())
    assert project.runs() == []
    assert wait_for("the pipeline to rest still", lambda: stopped_at(project)).startswith(f"stopped at epoch {head};")


def it_is_resumed(project: Project, head: int) -> None:
    assert project.launch("auctions_resume")["status"] == "SUCCESS"
    project.wait_for_epoch(head + 1, 120)
    assert project.epochs()[-1]["parent"] == head
