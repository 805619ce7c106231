"""What Dagster shows follows the log, whatever Dagster knew before."""

import shutil
from pathlib import Path

import dagster as dg
import pytest

from arroyo_dagster.engine import Engine
from arroyo_dagster.log import PipelineState
from arroyo_dagster.log.entries import Rewound
from arroyo_dagster.model import EpochSet, Manifest
from arroyo_dagster.orchestration.deployment import epoch_of, key_of
from arroyo_dagster.orchestration.view import View
from arroyo_dagster.testing import InProcessEngine
from tests.orchestration.helpers import (
    ASSETS,
    Daemon,
    begin,
    complete,
    everywhere,
    pipeline_in,
    state_of,
    take,
    with_interval,
)
from tests.orchestration.test_metadata import problems_of


@pytest.fixture
def daemon(instance: dg.DagsterInstance, tmp_path: Path) -> Daemon:
    return Daemon(instance, pipeline_in(tmp_path, policy=with_interval(hours=1)))


class TestKeys:
    @pytest.mark.parametrize("epoch", [1, 9, 10, 99_999_999, 100_000_000])
    def test_stand_for_their_epoch(self, epoch: int) -> None:
        assert epoch_of(key_of(epoch)) == epoch

    def test_sort_as_epochs_do(self) -> None:
        epochs = [1, 2, 9, 10, 11, 100, 12_345_678]
        assert sorted(map(key_of, reversed(epochs))) == [key_of(epoch) for epoch in epochs]

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "1",
            "00000000",
            "0000001",
            "000000001",
            "-0000001",
            "+0000001",
            "00000001 ",
            "1e7",
            "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661",
        ],
    )
    def test_that_are_none_stand_for_nothing(self, key: str) -> None:
        assert epoch_of(key) is None


def test_epochs_taken_outside_dagster_appear_with_all_their_assets(daemon: Daemon) -> None:
    take(daemon.pipeline, 2)
    tick = daemon.tick()
    assert tick.added[:2] == ["00000001", "00000002"]
    assert tick.reported == [(asset, key_of(epoch)) for epoch in (1, 2) for asset in ASSETS]
    assert daemon.materialized() == everywhere(1, 2)
    take(daemon.pipeline)
    assert daemon.tick().reported == [(asset, "00000003") for asset in ASSETS]
    assert daemon.materialized() == everywhere(1, 2, 3)


def test_what_is_reported_has_the_metadata_that_a_run_would_give_it(daemon: Daemon) -> None:
    take(daemon.pipeline)
    daemon.tick()
    for asset in ASSETS:
        [record] = daemon.instance.fetch_materializations(dg.AssetKey(["p", asset]), limit=10).records
        materialization = record.asset_materialization
        assert materialization
        assert materialization.metadata["arroyo/epoch"].value == 1
        assert problems_of(materialization.metadata) == []
        assert materialization.description == "Reported from the pipeline's log."


def test_nothing_is_reported_twice(daemon: Daemon) -> None:
    take(daemon.pipeline, 3)
    daemon.tick()
    for _ in range(2):
        again = daemon.tick()
        assert (again.reported, again.added, again.deleted) == ([], [], [])
    daemon.cursor = None  # as if somebody had reset it
    assert daemon.tick().reported == []
    assert daemon.materialized() == everywhere(1, 2, 3)


def test_a_dagster_that_knows_nothing_learns_all_that_is_kept(
    daemon: Daemon, another_instance: dg.DagsterInstance
) -> None:
    epochs = 27
    take(daemon.pipeline, epochs)
    daemon.ticks_until(lambda tick: not tick.reported)
    newcomer = Daemon(another_instance, daemon.pipeline)
    ticks = [newcomer.tick() for _ in range(3)]
    assert [len(tick.reported) for tick in ticks] == [20 * len(ASSETS), 7 * len(ASSETS), 0]  # so that ticks stay short
    assert newcomer.materialized() == everywhere(*range(1, epochs + 1)) == daemon.materialized()
    assert newcomer.keys() == daemon.keys() == [key_of(epoch) for epoch in range(1, epochs + 1)]


def test_keys_are_added_in_the_order_of_their_epochs(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """In a backfill from one key to another, Dagster takes those that were added in between."""
    daemon = Daemon(instance, pipeline_in(tmp_path))
    take(daemon.pipeline, 22)
    assert daemon.tick().request  # for epoch 23, while not all of those before it are reported
    daemon.tick()
    assert list(instance.get_dynamic_partitions("p_epochs")) == [key_of(epoch) for epoch in range(1, 24)]


def test_a_manifest_is_read_once_and_only_if_there_is_something_to_report(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(daemon.pipeline, 3)
    read, manifest = list[int](), Engine.manifest

    def counted(self: Engine, epoch: int, state: PipelineState | None = None) -> Manifest:
        read.append(epoch)
        return manifest(self, epoch, state)

    monkeypatch.setattr(Engine, "manifest", counted)
    daemon.tick()
    assert read == [1, 2, 3]
    daemon.cursor = None
    daemon.tick()
    assert read == [1, 2, 3]


def test_an_instance_that_has_lost_half_of_it_is_told_the_rest(daemon: Daemon) -> None:
    take(daemon.pipeline, 2)
    daemon.tick()
    daemon.instance.wipe_assets([dg.AssetKey(["p", "raw"])])
    daemon.instance.delete_dynamic_partition("p_epochs", "00000001")
    daemon.cursor = None
    assert daemon.tick().reported == [("raw", "00000001"), ("raw", "00000002")]
    assert daemon.materialized() == everywhere(1, 2)
    assert {"00000001", "00000002"} <= {*daemon.keys()}


def test_an_epoch_that_sinks_are_not_done_with_is_not_shown_yet(daemon: Daemon) -> None:
    take(daemon.pipeline)
    engine, attempt = begin(daemon.pipeline, "a-run-that-is-gone")
    complete(engine, attempt)
    assert daemon.tick().reported == [(asset, "00000001") for asset in ASSETS]
    engine.publish()
    assert daemon.tick().reported == [(asset, "00000002") for asset in ASSETS]


def test_keys_of_epochs_that_a_cleaning_has_removed_elsewhere_go(
    daemon: Daemon, another_instance: dg.DagsterInstance
) -> None:
    take(daemon.pipeline, 4)
    daemon.tick()
    elsewhere = Daemon(another_instance, daemon.pipeline)
    assert elsewhere.run("cleanup", config={"keep_last": 2}).success
    tick = daemon.tick()
    assert tick.deleted == ["00000001"]
    assert daemon.keys() == ["00000002", "00000003", "00000004"]  # from epoch 2, a replay of 3 would start
    assert tick.reported == []
    assert daemon.tick().deleted == []


def test_epochs_that_a_rewind_has_superseded_stay_until_they_are_cleaned(daemon: Daemon) -> None:
    take(daemon.pipeline, 3)
    daemon.tick()
    engine = InProcessEngine(daemon.pipeline)
    engine.record(Rewound(1, EpochSet.of([2, 3])))
    engine.publish()
    daemon.tick()
    assert {"00000001", "00000002", "00000003"} <= {*daemon.keys()}
    take(daemon.pipeline)
    assert daemon.tick().reported == [(asset, "00000004") for asset in ASSETS]


def test_an_epoch_whose_run_may_still_report_it_is_left_to_that(daemon: Daemon) -> None:
    take(daemon.pipeline, 2)
    run = daemon.launched(epoch=2)
    assert {partition for _, partition in daemon.tick().reported} == {"00000001"}
    daemon.instance.report_run_failed(run)
    assert {partition for _, partition in daemon.tick().reported} == {"00000002"}


def test_a_lost_manifest_holds_nothing_up(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    daemon = Daemon(instance, pipeline_in(tmp_path))
    take(daemon.pipeline, 2)
    path = tmp_path / "state" / "p" / state_of(daemon.pipeline).manifest_of(1)
    path.unlink()
    tick = daemon.tick()
    assert tick.request
    assert {partition for _, partition in tick.reported} == {"00000002"}
    assert daemon.keys()[:2] == ["00000001", "00000002"]


class TestNewLife:
    def begin_anew(self, daemon: Daemon, tmp_path: Path) -> None:
        shutil.rmtree(tmp_path / "state")
        take(daemon.pipeline, 2)

    def test_of_a_pipeline_is_shown_in_the_place_of_the_old_one(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 4)
        daemon.tick()
        old = state_of(daemon.pipeline).life
        self.begin_anew(daemon, tmp_path)
        assert state_of(daemon.pipeline).life != old
        tick = daemon.tick()
        assert tick.reported == [(asset, key_of(epoch)) for epoch in (1, 2) for asset in ASSETS]
        assert "00000004" in tick.deleted
        assert {"00000001", "00000002"} <= {*daemon.keys()} <= {"00000001", "00000002", "00000003"}  # 3 may be next
        assert daemon.tick().reported == []
        for asset in ASSETS:
            latest = daemon.instance.get_latest_materialization_event(dg.AssetKey(["p", asset]))
            assert latest
            assert latest.asset_materialization
            assert latest.asset_materialization.partition == "00000002"

    def test_with_more_epochs_than_a_tick_reports_is_shown_whole(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 25)
        daemon.ticks_until(lambda tick: not tick.reported)
        shutil.rmtree(tmp_path / "state")
        take(daemon.pipeline, 25)
        reported = [entry for _ in range(3) for entry in daemon.tick().reported]
        assert reported == [(asset, key_of(epoch)) for epoch in range(1, 26) for asset in ASSETS]

    def test_that_has_not_begun_shows_nothing(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 2)
        daemon.tick()
        shutil.rmtree(tmp_path / "state")
        tick = daemon.tick()
        assert tick.request
        assert tick.request.partition_key == "00000001"
        assert tick.deleted == ["00000002"]
        assert daemon.keys() == ["00000001", "00000003"]  # that one was asked for before


def test_a_view_survives_its_way_through_the_cursor() -> None:
    view = View("life", EpochSet(((1, 3), (7, 9))))
    assert View.of(view.cursor) == view
    assert View.of(None) == View()
