"""Existing epochs, replayed from Dagster."""

from pathlib import Path

import dagster as dg
import pytest

from arroyo_dagster.engine import Engine
from arroyo_dagster.log.entries import ReplayFinished, ReplayStarted
from arroyo_dagster.model import EpochSet
from arroyo_dagster.orchestration.checks import REPLAYED
from arroyo_dagster.replay import begin_replay
from arroyo_dagster.testing import TableSource
from tests.orchestration.helpers import (
    ASSETS,
    CUTS,
    ROWS,
    Daemon,
    expected_output,
    history,
    output,
    pipeline_in,
    state_of,
    take,
    why,
)

EPOCHS = len(CUTS)
RANGE = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")


@pytest.fixture
def daemon(instance: dg.DagsterInstance, tmp_path: Path, spark: object) -> Daemon:
    """A pipeline with a few epochs that Dagster knows of."""
    daemon = Daemon(instance, pipeline_in(tmp_path))
    take(daemon.pipeline, EPOCHS)
    daemon.ticks_until(lambda tick: not tick.reported)
    return daemon


def changed(daemon: Daemon, directory: Path) -> Daemon:
    """The same, but the source no longer gives what it gave in the second epoch."""
    other = ROWS.set_column(ROWS.schema.get_field_index("v"), "v", ROWS["v"].combine_chunks().fill_null(0))
    values = [None if row == CUTS[0] else value for row, value in enumerate(other["v"].to_pylist())]
    other = other.set_column(other.schema.get_field_index("v"), ROWS.schema.field("v"), [values])
    return Daemon(daemon.instance, pipeline_in(directory, source=TableSource(other, CUTS)))


def latest_metadata(daemon: Daemon, node: str, partition: str) -> dict[str, object]:
    key = dg.AssetKey([daemon.name, node])
    [record] = daemon.instance.fetch_materializations(
        dg.AssetRecordsFilter(key, asset_partitions=[partition]), limit=1
    ).records
    assert record.asset_materialization
    return {name: value.value for name, value in record.asset_materialization.metadata.items()}


def checks_of(result: dg.ExecuteInProcessResult, name: str) -> dict[str, bool]:
    events = (event for event in result.all_events if event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    evaluations = [event.asset_check_evaluation_data for event in events]
    return {found.asset_key.path[-1]: found.passed for found in evaluations if found.check_name == name}


def test_materializing_an_epoch_again_replays_it(daemon: Daemon, tmp_path: Path) -> None:
    shown = output(tmp_path)
    result = daemon.run("checkpoint", "00000002")
    assert result.success
    assert checks_of(result, REPLAYED) == dict.fromkeys(ASSETS, True)
    assert set(checks_of(result, "files_whole").values()) == {True}
    state = state_of(daemon.pipeline)
    assert (state.verified, state.head, state.replays) == (EpochSet.of([2]), EPOCHS, ())
    assert output(tmp_path) == shown
    metadata = latest_metadata(daemon, "totals", "00000002")
    assert (metadata["arroyo/replay"], metadata["arroyo/rows_in"]) == ("identical", CUTS[1] - CUTS[0])


def test_a_backfill_replays_a_range_in_one_run(daemon: Daemon) -> None:
    result = daemon.run("checkpoint", tags=dict(zip(RANGE, ("00000001", "00000003"), strict=True)))
    assert result.success
    assert state_of(daemon.pipeline).verified == EpochSet.of([1, 2, 3])
    runs = {entry.fact.run_id for entry in history(daemon.pipeline) if isinstance(entry.fact, ReplayStarted)}
    assert runs == {result.run_id}
    for epoch, partition in enumerate(("00000001", "00000002", "00000003"), 1):
        metadata = latest_metadata(daemon, "stats", partition)
        assert (metadata["arroyo/epoch"], metadata["arroyo/replay"]) == (epoch, "identical")


def test_a_range_with_an_epoch_that_does_not_exist_is_refused_whole(daemon: Daemon) -> None:
    daemon.instance.add_dynamic_partitions("p_epochs", ["00000004"])
    result = daemon.run("checkpoint", tags=dict(zip(RANGE, ("00000002", "00000004"), strict=True)))
    assert why(result) == (
        "pipeline 'p' cannot replay epochs 2-4, because 4 do not exist; those that can be replayed are 1-3"
    )
    assert not any(isinstance(entry.fact, ReplayStarted) for entry in history(daemon.pipeline))


def test_a_replay_that_differs_fails_and_says_what_differs(daemon: Daemon, tmp_path: Path) -> None:
    shown, before = output(tmp_path), daemon.materialized()
    result = changed(daemon, tmp_path).run("checkpoint", "00000002")
    assert why(result).startswith("pipeline 'p' does not do today what it did then, in epoch 2 (table ")
    assert "output raw: 40 rows then, 40 now, and not the same" in why(result)
    assert "Rewind to the epoch before if today's result is the right one" in why(result)
    assert checks_of(result, REPLAYED) == dict.fromkeys(ASSETS, False)
    assert (output(tmp_path), daemon.materialized()) == (shown, before)
    assert state_of(daemon.pipeline).differing == EpochSet.of([2])


def test_lost_output_is_there_again(daemon: Daemon, tmp_path: Path) -> None:
    shown = output(tmp_path)
    for path in (tmp_path / "out").rglob("epoch-0000000002-*.parquet"):
        path.unlink()
    assert output(tmp_path) != shown
    assert daemon.run("checkpoint", "00000002").success
    assert output(tmp_path) == shown


def test_the_job_replays_what_it_is_told(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.run("replay", config={"epochs": "1, 3"}).success
    assert state_of(daemon.pipeline).verified == EpochSet.of([1, 3])
    assert latest_metadata(daemon, "windows", "00000003")["arroyo/replay"] == "identical"
    result = changed(daemon, tmp_path).run("replay", config={"epochs": "1-2"})
    assert "in epoch 2 (" in why(result)
    assert checks_of(result, REPLAYED)["totals"] is False


@pytest.mark.parametrize(
    ("epochs", "sentence"),
    [
        ("2-9", "pipeline 'p' has no epochs 4-9; those that are kept are 1-3"),
        ("3-2", "'3-2' are no epochs: write 3, or 3-7, or 1, 4-6, 9"),
        ("all", "'all' are no epochs: write 3, or 3-7, or 1, 4-6, 9"),
        ("", "'' are no epochs: write 3, or 3-7, or 1, 4-6, 9"),
    ],
)
def test_the_job_refuses_what_cannot_be(daemon: Daemon, epochs: str, sentence: str) -> None:
    assert why(daemon.run("replay", config={"epochs": epochs})) == sentence


def test_a_replay_that_dies_is_cleared_away_and_holds_nobody_up(daemon: Daemon, tmp_path: Path) -> None:
    run = daemon.launched("replay")
    begin_replay(Engine(daemon.pipeline), 2, run.run_id)
    assert daemon.tick().request, "a replay that is at work holds no checkpoint up"
    daemon.instance.report_run_failed(run)
    daemon.tick()
    finished = [entry.fact for entry in history(daemon.pipeline) if isinstance(entry.fact, ReplayFinished)]
    assert [(fact.epoch, fact.outcome.value) for fact in finished] == [(2, "failed")]


def test_what_was_replayed_is_what_undisturbed_epochs_give(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.run("replay", config={"epochs": "1-3"}).success
    assert output(tmp_path) == expected_output(tmp_path / "undisturbed", EPOCHS)
