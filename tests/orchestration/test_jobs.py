"""What people do to a pipeline, as jobs."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pendulum
import pytest

from arroyo_dagster import Retention
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import Mode
from arroyo_dagster.log.entries import CleanupAborted
from arroyo_dagster.log.store import ObjectStorage
from arroyo_dagster.model import EpochSet, ObjectPath
from arroyo_dagster.testing import Crash, InProcessEngine
from tests.orchestration.helpers import (
    CUTS,
    EAGER,
    ROWS,
    Daemon,
    begin,
    complete,
    expected_output,
    facts,
    history,
    output,
    pipeline_in,
    state_of,
    take,
    why,
    with_interval,
)

Status = dg.DagsterRunStatus


@pytest.fixture
def daemon(instance: dg.DagsterInstance, tmp_path: Path) -> Daemon:
    return Daemon(instance, pipeline_in(tmp_path, policy=with_interval(hours=1), retention=Retention(keep_last=2)))


def files_in(tmp_path: Path) -> set[str]:
    state = tmp_path / "state" / "p"
    return {str(path.relative_to(state)) for path in (state / "epochs").rglob("*") if path.is_file()}


def metadata_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    assert result.success
    [output] = [event for event in result.all_events if event.is_successful_output]
    return {key.removeprefix("arroyo/"): value.value for key, value in output.step_output_data.metadata.items()}


def logged(daemon: Daemon, result: dg.ExecuteInProcessResult) -> list[str]:
    """What the run has told the person who launched it."""
    entries = daemon.instance.all_logs(result.run_id)
    return [entry.user_message for entry in entries if not entry.is_dagster_event]


class TestStop:
    def test_asks_for_a_last_epoch_at_once_and_resume_takes_it_back(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 3)
        daemon.tick()
        assert daemon.run("stop").success
        assert state_of(daemon.pipeline).mode is Mode.STOP_REQUESTED
        _, engine, attempt = daemon.begun(daemon.requested())
        assert attempt.barrier.then_stop
        complete(engine, attempt)
        engine.publish()
        daemon.instance.delete_run(attempt_run(daemon))
        assert daemon.tick().reason == "stopped at epoch 4; resume to go on"
        assert daemon.run("resume").success
        assert state_of(daemon.pipeline).mode is Mode.RUNNING

    def test_twice_is_refused_and_so_is_resuming_what_runs(self, daemon: Daemon) -> None:
        take(daemon.pipeline)
        assert why(daemon.run("resume")) == "pipeline 'p': the pipeline is running"
        assert daemon.run("stop").success
        assert why(daemon.run("stop")) == "pipeline 'p': the pipeline is already stop requested"

    def test_of_a_pipeline_that_has_not_begun_is_refused(self, daemon: Daemon) -> None:
        assert why(daemon.run("stop")) == "pipeline 'p': the pipeline has not been created yet"


def attempt_run(daemon: Daemon) -> str:
    [record] = daemon.instance.get_run_records(dg.RunsFilter(statuses=[Status.STARTED]))
    return record.dagster_run.run_id


class TestPin:
    def test_keeps_an_epoch_that_no_rule_keeps_until_it_is_unpinned(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 5)
        assert daemon.run("pin", config={"epoch": 1, "label": "audit"}).success
        assert state_of(daemon.pipeline).pins == {1: "audit"}
        found = metadata_of(daemon.run("cleanup", config={}))
        assert "| 1 | pinned as 'audit' |" in found["plan"]
        assert state_of(daemon.pipeline).kept == EpochSet.of([1, 3, 4, 5])
        assert daemon.run("pin", config={"epoch": 1, "unpin": True}).success
        assert daemon.run("cleanup", config={}).success
        assert state_of(daemon.pipeline).kept == EpochSet.of([3, 4, 5])

    def test_of_an_epoch_that_is_not_there_is_refused(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 2)
        assert why(daemon.run("pin", config={"epoch": 7})) == "pipeline 'p': epoch 7 does not exist; kept are 1-2"
        assert why(daemon.run("pin", config={"epoch": 2, "unpin": True})) == (
            "pipeline 'p': epoch 2 is not pinned; pinned are none"
        )

    def test_wants_an_epoch(self, daemon: Daemon) -> None:
        with pytest.raises(dg.DagsterInvalidConfigError, match="epoch"):
            daemon.run("pin", config={"label": "nothing"})


class TestRewind:
    def test_takes_output_back_and_lets_the_same_rows_be_processed_again(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 3)
        whole = output(tmp_path)
        result = daemon.run("rewind", config={"epoch": 1})
        assert result.success
        assert "epoch 1 of p is the head again; superseded are 2-3" in logged(daemon, result)
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)
        request = daemon.requested()  # without waiting for the interval: there is a backlog now
        assert request.partition_key == "00000004"
        take(daemon.pipeline, 2)
        again = output(tmp_path)
        for sink in ("windows", "late", "raw"):
            assert again[sink] == whole[sink], sink
        assert totals(again["running"]) == totals(whole["running"])
        assert InProcessEngine(daemon.pipeline).verify() == []

    def test_to_0_begins_anew(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 3)
        whole = output(tmp_path)
        assert daemon.run("rewind", config={"epoch": 0}).success
        assert output(tmp_path) == {"running": [], "windows": [], "late": [], "raw": []}
        take(daemon.pipeline, 3)
        assert output(tmp_path)["raw"] == whole["raw"]
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.register("input", ROWS.slice(0, CUTS[-1]))
            assert whole["raw"] == connection.execute("SELECT * FROM input ORDER BY ALL").fetchall()

    @pytest.mark.parametrize("epoch", [-1, 9])
    def test_to_an_epoch_that_is_not_there_is_refused(self, daemon: Daemon, epoch: int) -> None:
        take(daemon.pipeline, 2)
        before = state_of(daemon.pipeline)
        assert why(daemon.run("rewind", config={"epoch": epoch})) == (
            f"pipeline 'p' is not rewound: epoch {epoch} cannot be rewound to; live epochs are 1-2"
        )
        assert state_of(daemon.pipeline) == before

    def test_is_refused_while_an_epoch_is_being_taken(self, daemon: Daemon) -> None:
        take(daemon.pipeline)
        begin(daemon.pipeline, "a-run")
        assert why(daemon.run("rewind", config={"epoch": 0})) == (
            "pipeline 'p' is not rewound: attempt 1 at epoch 2 is in flight"
        )


def totals(running: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Running totals without the numbers of their epochs, which a rewind does not use again."""
    return sorted((key, total) for key, total, _ in running)


class TestCleanup:
    def test_frees_files_and_keys_and_leaves_the_rest_whole(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 5)
        daemon.tick()
        before, shown = files_in(tmp_path), output(tmp_path)
        found = metadata_of(daemon.run("cleanup", config={}))
        gone = before - files_in(tmp_path)
        freed = {path for path in gone if not path.endswith("manifest.json")}
        assert found["epochs_removed"] == 2
        assert found["epochs_kept"] == 3
        assert found["files_freed"] == len(freed) > 0
        assert found["not_deleted"] == 0
        assert found["bytes_freed"] > 0
        assert "Removes epochs **1-2**" in found["plan"]
        assert "| 5 | among the last 2; the head |" in found["plan"]
        assert manifests(gone) == {1, 2}
        assert daemon.keys() == ["00000003", "00000004", "00000005"]
        assert InProcessEngine(daemon.pipeline).verify() == []
        assert output(tmp_path) == shown
        take(daemon.pipeline)
        assert daemon.tick().reported != []

    def test_dry_shows_the_plan_and_changes_nothing(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 5)
        daemon.tick()
        files, log, keys = files_in(tmp_path), facts(daemon.pipeline), daemon.keys()
        found = metadata_of(daemon.run("cleanup", config={"dry_run": True}))
        assert "Removes epochs **1-2**" in found["plan"]
        assert (found["epochs_removed"], found["files_freed"], found["bytes_freed"]) == (0, 0, 0)
        assert (files_in(tmp_path), facts(daemon.pipeline), daemon.keys()) == (files, log, keys)

    def test_with_nothing_to_do_leaves_no_word_in_the_log(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 2)
        log = facts(daemon.pipeline)
        assert metadata_of(daemon.run("cleanup", config={}))["epochs_removed"] == 0
        assert facts(daemon.pipeline) == log

    def test_follows_rules_that_are_given_for_once(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 5)
        assert metadata_of(daemon.run("cleanup", config={"keep_within": "1 day"}))["epochs_removed"] == 0
        assert metadata_of(daemon.run("cleanup", config={"keep_last": 1}))["epochs_removed"] == 3
        assert state_of(daemon.pipeline).kept == EpochSet.of([4, 5])

    @pytest.mark.parametrize(
        ("config", "sentence"),
        [
            ({"keep_last": 0}, "a retention's keep_last must be 1 or more, not 0; leave it out for none"),
            (
                {"keep_within": "a while"},
                "keep_within must be a duration such as '10 seconds' or '1 hour 30 minutes', not 'a while'",
            ),
        ],
    )
    def test_by_rules_that_are_none_is_refused(self, daemon: Daemon, config: dict[str, Any], sentence: str) -> None:
        take(daemon.pipeline, 3)
        assert why(daemon.run("cleanup", config=config)) == sentence
        assert state_of(daemon.pipeline).kept == EpochSet.of([1, 2, 3])

    def test_of_nothing_is_refused(self, daemon: Daemon) -> None:
        assert why(daemon.run("cleanup", config={})) == (
            "pipeline 'p' is not cleaned up now: there is no epoch yet, so there is nothing to clean"
        )

    def test_waits_for_the_epoch_that_is_being_taken(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 4)
        run = daemon.launched(epoch=5)
        engine, attempt = begin(daemon.pipeline, run.run_id)

        def take_it() -> None:
            time.sleep(1.5)
            complete(engine, attempt)
            engine.publish()
            daemon.instance.report_run_canceled(run)

        with ThreadPoolExecutor(1) as other:
            taken = other.submit(take_it)
            assert daemon.run("cleanup", config={}).success
            taken.result()
        words = facts(daemon.pipeline)
        assert words.index("CleanupStarted") > len(words) - 1 - words[::-1].index("CheckpointCompleted")

    def test_does_not_wait_for_ever(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        policy = replace(EAGER, timeout=pendulum.duration(seconds=2))
        daemon = Daemon(instance, pipeline_in(tmp_path, policy=policy, retention=Retention(keep_last=2)))
        take(daemon.pipeline, 4)
        run = daemon.launched(epoch=5, status=dg.DagsterRunStatus.QUEUED)
        before = files_in(tmp_path)
        assert why(daemon.run("cleanup", config={})) == (
            f"pipeline 'p' is not cleaned up now: checkpoint run {run.run_id[:8]} is active; cleaning waits for it"
        )
        assert files_in(tmp_path) == before

    def test_that_dies_in_the_middle_is_finished_by_the_next_one(
        self, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take(daemon.pipeline, 5)
        daemon.tick()
        with monkeypatch.context() as patch:
            fail_deletions(patch, 2, Crash("the process is killed"))
            assert not daemon.run("cleanup", config={}).success
        assert state_of(daemon.pipeline).kept == EpochSet.of([3, 4, 5])
        assert manifests(files_in(tmp_path)) == {1, 2, 3, 4, 5}
        aborted = history(daemon.pipeline)[-1].fact
        assert isinstance(aborted, CleanupAborted)
        assert aborted.reason == "Crash: the process is killed"
        time.sleep(0.6)  # the back-off
        assert daemon.run("cleanup", config={}).success
        assert manifests(files_in(tmp_path)) == {3, 4, 5}
        engine = InProcessEngine(daemon.pipeline)
        assert files_in(tmp_path) == {
            path for epoch in (3, 4, 5) for path in (*(f.path for f in engine.manifest(epoch).files), manifest(epoch))
        }
        assert engine.verify() == []
        daemon.tick()
        assert daemon.keys() == ["00000003", "00000004", "00000005"]

    def test_reports_a_file_that_cannot_be_deleted_and_takes_it_the_next_time(
        self, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take(daemon.pipeline, 5)
        before = files_in(tmp_path)
        with monkeypatch.context() as patch:
            fail_deletions(patch, 1, StorageError("could not delete it: access denied"), once=True)
            result = daemon.run("cleanup", config={})
        found = metadata_of(result)
        assert found["not_deleted"] == 1
        assert found["files_freed"] > 1
        assert "could not delete it: access denied" in logged(daemon, result)
        assert manifests(files_in(tmp_path)) == {1, 2, 3, 4, 5}  # they lead to the file that is left
        assert metadata_of(daemon.run("cleanup", config={}))["files_freed"] > 0
        assert manifests(files_in(tmp_path)) == {3, 4, 5}
        assert files_in(tmp_path) < before
        assert InProcessEngine(daemon.pipeline).verify() == []


def manifests(paths: set[str]) -> set[int]:
    return {int(path.split("/")[1]) for path in paths if path.endswith("manifest.json")}


def manifest(epoch: int) -> str:
    return f"epochs/{epoch:020d}/attempt-1/manifest.json"


def fail_deletions(patch: pytest.MonkeyPatch, number: int, error: BaseException, *, once: bool = False) -> None:
    """Let deletions in epochs fail, from the nth on or just that one."""
    delete, count = ObjectStorage.delete, 0

    def deletes(self: ObjectStorage, path: ObjectPath) -> None:
        nonlocal count
        if str(path).startswith("epochs/"):
            count += 1
            if count == number or (count > number and not once):
                raise error
        delete(self, path)

    patch.setattr(ObjectStorage, "delete", deletes)


class TestPublish:
    def test_with_nothing_to_do_does_nothing(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline)
        log, shown = facts(daemon.pipeline), output(tmp_path)
        result = daemon.run("publish")
        assert result.success
        assert "the sinks show epoch 1 of p, and all before it" in logged(daemon, result)
        assert (facts(daemon.pipeline), output(tmp_path)) == (log, shown)

    def test_names_the_run_that_wrote_it_into_the_log(self, daemon: Daemon) -> None:
        engine, attempt = begin(daemon.pipeline, "a-run-that-is-gone")
        complete(engine, attempt)
        result = daemon.run("publish")
        assert result.success
        assert history(daemon.pipeline)[-1].writer.startswith(f"run {result.run_id}/")


def test_the_schedule_launches_a_cleaning_by_the_pipelines_own_rules(daemon: Daemon) -> None:
    take(daemon.pipeline, 4)
    schedule = daemon.definitions.resolve_schedule_def("p_cleanup_schedule")
    with dg.build_schedule_context(instance=daemon.instance) as context:
        [request] = schedule.evaluate_tick(context).run_requests or ()
    job = daemon.definitions.resolve_job_def("p_cleanup")
    assert job.execute_in_process(run_config=dict(request.run_config), instance=daemon.instance).success
    assert state_of(daemon.pipeline).kept == EpochSet.of([2, 3, 4])
