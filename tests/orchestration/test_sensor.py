"""What the controller's sensor makes of what it sees."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pendulum
import pytest

from arroyo_dagster import CheckpointPolicy
from arroyo_dagster.log.entries import CheckpointAborted, CheckpointStarted, Resumed, SinksFailed, StopRequested
from arroyo_dagster.model import EpochSet
from arroyo_dagster.orchestration import runs
from arroyo_dagster.orchestration.deployment import key_of
from arroyo_dagster.orchestration.runs import PROCESS_TAG, bury_the_gone
from arroyo_dagster.orchestration.sensor import WORK_TAG
from arroyo_dagster.orchestration.view import View
from arroyo_dagster.processes import own_run_id
from arroyo_dagster.testing import InProcessEngine, TableSource
from benchmarks.log import build
from tests.orchestration import light
from tests.orchestration.helpers import (
    ASSETS,
    EAGER,
    Daemon,
    begin,
    complete,
    deployment_of,
    everywhere,
    expected_output,
    facts,
    history,
    output,
    pipeline_in,
    state_of,
    take,
    with_interval,
)

Status = dg.DagsterRunStatus
DEAD_PROCESS = f"process-{2**22 + 1}-1@{own_run_id().partition('@')[2]}"  # no machine numbers so high


@pytest.fixture
def daemon(instance: dg.DagsterInstance, tmp_path: Path) -> Daemon:
    return Daemon(instance, pipeline_in(tmp_path))


class TestStart:
    def test_the_first_tick_asks_for_epoch_1_and_for_its_partition(self, daemon: Daemon) -> None:
        tick = daemon.tick()
        life = state_of(daemon.pipeline).life
        assert tick.request
        assert tick.request.run_key == f"p/{life}/epoch-1/attempt-1/first"
        assert tick.request.job_name == "p_checkpoint"
        assert tick.request.partition_key == "00000001"
        assert tick.request.tags["arroyo_dagster/pipeline"] == "p"
        assert tick.added == ["00000001"]
        assert daemon.keys() == ["00000001"]
        assert tick.reported == []
        assert facts(daemon.pipeline) == ["PipelineCreated"]

    def test_a_second_tick_before_anything_was_launched_asks_for_the_same(self, daemon: Daemon) -> None:
        first, second = daemon.tick(), daemon.tick()
        assert first.request
        assert second.request
        assert first.request.run_key == second.request.run_key  # so that Dagster launches it once

    def test_once_an_epoch_is_complete_the_next_is_asked_for(self, daemon: Daemon) -> None:
        take(daemon.pipeline)
        tick = daemon.tick()
        assert tick.request
        assert tick.request.partition_key == "00000002"
        assert "/epoch-2/attempt-1/" in str(tick.request.run_key)

    def test_nothing_is_asked_for_before_the_interval_is_over(
        self, instance: dg.DagsterInstance, tmp_path: Path
    ) -> None:
        pipeline = pipeline_in(tmp_path, policy=with_interval(seconds=30), source=one_cut())
        daemon = Daemon(instance, pipeline)
        take(pipeline, clock=lambda: pendulum.now("UTC").subtract(seconds=12))
        tick = daemon.tick()
        assert tick.request is None
        assert tick.reason in {f"the next checkpoint is due after the interval, {n} s of 30 s" for n in range(12, 20)}

    def test_with_a_backlog_nobody_waits_for_the_interval(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        pipeline = pipeline_in(tmp_path, policy=with_interval(hours=1))
        take(pipeline)
        assert Daemon(instance, pipeline).tick().request

    def test_an_idle_pipeline_is_left_alone_if_it_wants_that(
        self, instance: dg.DagsterInstance, tmp_path: Path
    ) -> None:
        policy = with_interval(microseconds=1)
        pipeline = pipeline_in(tmp_path, policy=CheckpointPolicy(interval=policy.interval, skip_idle=True))
        daemon = Daemon(instance, pipeline)
        take(pipeline, 2)
        assert daemon.tick().request
        take(pipeline)
        assert daemon.tick().reason == "no source has anything new since epoch 3"


def one_cut() -> TableSource:
    from tests.orchestration.helpers import ROWS  # noqa: PLC0415

    return TableSource(ROWS, [len(ROWS)])


class TestHeldBy:
    @pytest.mark.parametrize(
        "status", [Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING]
    )
    def test_a_run_in_any_state_that_is_not_the_end(self, daemon: Daemon, status: dg.DagsterRunStatus) -> None:
        run = daemon.launched(status=status, epoch=1)
        assert daemon.tick().reason == f"checkpoint run {run.run_id[:8]} is active"

    @pytest.mark.parametrize("status", [Status.SUCCESS, Status.FAILURE, Status.CANCELED])
    def test_no_run_that_has_ended(self, daemon: Daemon, status: dg.DagsterRunStatus) -> None:
        daemon.launched(status=status, epoch=1)
        assert daemon.tick().request

    def test_a_run_that_was_launched_from_an_asset_page(self, daemon: Daemon) -> None:
        job = daemon.definitions.resolve_implicit_global_asset_job_def()
        ours = {dg.AssetKey(["p", name]) for name in ASSETS}
        run = daemon.instance.create_run_for_job(job, asset_selection=ours, status=Status.STARTED)
        assert run.job_name.startswith("__ASSET_JOB")
        assert daemon.tick().reason == f"checkpoint run {run.run_id[:8]} is active"

    def test_no_run_from_an_asset_page_of_another_pipeline(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        daemon, other = Daemon(instance, pipeline_in(tmp_path)), Daemon(instance, pipeline_in(tmp_path, "other"))
        job = other.definitions.resolve_implicit_global_asset_job_def()
        theirs = {dg.AssetKey(["other", name]) for name in ASSETS}
        instance.create_run_for_job(job, asset_selection=theirs, status=Status.STARTED)
        assert daemon.tick().request
        assert other.tick().reason

    def test_no_run_of_a_pipeline_whose_name_begins_alike(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        daemon, other = Daemon(instance, pipeline_in(tmp_path)), Daemon(instance, pipeline_in(tmp_path, "p_2"))
        other.launched(epoch=1)
        assert daemon.tick().request
        assert other.tick().reason

    def test_a_cleaning_that_was_launched(self, daemon: Daemon) -> None:
        take(daemon.pipeline)
        run = daemon.launched("cleanup")
        assert daemon.tick().reason == f"cleaning run {run.run_id[:8]} is active"

    @pytest.mark.parametrize("job", ["stop", "resume", "pin"])
    def test_no_run_of_a_job_that_only_writes_a_word_into_the_log(self, daemon: Daemon, job: str) -> None:
        daemon.launched(job)
        assert daemon.tick().request

    def test_no_run_of_somebody_elses_job_whatever_it_is_called(self, daemon: Daemon) -> None:
        @dg.job(name="cleanup")
        def cleanup() -> None:
            """No job of a pipeline's."""

        daemon.instance.create_run_for_job(cleanup, status=Status.STARTED)
        assert daemon.tick().request

    def test_a_process_outside_dagster_that_lives(self, daemon: Daemon) -> None:
        begin(daemon.pipeline, own_run_id())
        assert "is being taken by process-" in str(daemon.tick().reason)

    def test_no_run_that_is_older_than_the_time_out(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        policy = CheckpointPolicy(interval=EAGER.interval, timeout=pendulum.duration(microseconds=1))
        daemon = Daemon(instance, pipeline_in(tmp_path, policy=policy))
        daemon.launched(status=Status.STARTED, epoch=1)
        assert daemon.tick().request

    def test_a_run_that_queues_however_long_it_does(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        policy = CheckpointPolicy(interval=EAGER.interval, timeout=pendulum.duration(milliseconds=100))
        daemon = Daemon(instance, pipeline_in(tmp_path, policy=policy))
        daemon.launched(status=Status.QUEUED, epoch=1)
        time.sleep(0.2)
        assert daemon.tick().reason


End = Callable[[dg.DagsterInstance, dg.DagsterRun], object]
ENDS: dict[str, End] = {
    "it fails": lambda instance, run: instance.report_run_failed(run),
    "it is canceled": lambda instance, run: instance.report_run_canceled(run),
    "somebody deletes it": lambda instance, run: instance.delete_run(run.run_id),
    "its process is gone": lambda instance, run: instance.add_run_tags(
        run.run_id, {PROCESS_TAG: f"{run.run_id}/{DEAD_PROCESS}"}
    ),
}


class TestRunThatDies:
    @pytest.mark.parametrize("end", ENDS)
    def test_after_it_began_is_recorded_and_followed_by_another_with_the_same_plan(
        self, daemon: Daemon, end: str
    ) -> None:
        request = daemon.requested()
        run, _, _ = daemon.begun(request)
        assert str(daemon.tick().reason).startswith(f"epoch 1, attempt 1, is being taken by run {run.run_id[:8]} for")
        ENDS[end](daemon.instance, run)
        waiting = daemon.tick()
        assert waiting.request is None
        assert f"run {run.run_id[:8]} ended before the epoch was complete" in str(waiting.reason)
        assert "waiting to try again" in str(waiting.reason)
        again = daemon.requested()
        assert again.run_key == str(request.run_key).replace("attempt-1", "attempt-2")
        assert again.partition_key == request.partition_key
        daemon.begun(again)
        begun = [entry.fact for entry in history(daemon.pipeline) if isinstance(entry.fact, CheckpointStarted)]
        assert [fact.attempt for fact in begun] == [1, 2]
        assert begun[0].plan == begun[1].plan
        assert facts(daemon.pipeline).count("CheckpointAborted") == 1

    @pytest.mark.parametrize("end", ["it fails", "it is canceled", "its process is gone"])
    def test_before_it_began_is_followed_by_one_with_another_run_key(self, daemon: Daemon, end: str) -> None:
        request = daemon.requested()
        run = daemon.launched(tags={**request.tags, "dagster/run_key": str(request.run_key)})
        assert daemon.tick().reason == f"checkpoint run {run.run_id[:8]} is active"
        ENDS[end](daemon.instance, run)
        again = daemon.requested()
        assert again.run_key != request.run_key
        assert again.tags[WORK_TAG] == request.tags[WORK_TAG]
        assert facts(daemon.pipeline) == ["PipelineCreated"]

    def test_again_and_again_never_gets_a_run_key_a_second_time(self, daemon: Daemon) -> None:
        keys = []
        for _ in range(3):
            request = daemon.requested()
            keys.append(request.run_key)
            daemon.instance.report_run_failed(daemon.launched(tags=request.tags))
        assert len(set(keys)) == 3

    def test_and_is_deleted_leaves_no_run_key_that_is_taken(self, daemon: Daemon) -> None:
        """Dagster passes over a request whose run key it has a run of, and the pipeline would stand still."""
        taken: dict[str, dg.DagsterRun] = {}
        for _ in range(2):
            request = daemon.requested()
            run = daemon.launched(tags={**request.tags, "dagster/run_key": str(request.run_key)})
            daemon.instance.report_run_failed(run)
            taken[str(request.run_key)] = run
        first, second = taken
        daemon.instance.delete_run(taken[first].run_id)
        assert daemon.requested().run_key != second

    def test_but_not_for_dagster_leaves_no_run_key_that_is_taken(
        self, instance: dg.DagsterInstance, tmp_path: Path
    ) -> None:
        """A machine that goes down before a run has begun leaves one that Dagster takes to be running for ever."""
        policy = CheckpointPolicy(interval=EAGER.interval, timeout=pendulum.duration(milliseconds=100))
        daemon = Daemon(instance, pipeline_in(tmp_path, policy=policy))
        request = daemon.requested()
        daemon.launched(tags={**request.tags, "dagster/run_key": str(request.run_key)})
        time.sleep(0.2)
        assert daemon.ticks_until(lambda tick: tick.request is not None).request
        assert daemon.requested().run_key != request.run_key

    def test_without_a_word_backs_off(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        policy = CheckpointPolicy(interval=EAGER.interval, backoff=pendulum.duration(minutes=1))
        daemon = Daemon(instance, pipeline_in(tmp_path, policy=policy))
        request = daemon.requested()
        for times in ("once", "2 times in a row"):
            run = daemon.launched(tags=request.tags)
            instance.report_run_failed(run)
            assert str(daemon.tick().reason).startswith(
                f"launching a run for epoch 1, attempt 1, has failed {times}, the last time because "
                f"run {run.run_id[:8]} ended before it began; waiting to try again"
            )

    def test_and_is_executed_again_is_not_taken_for_dead_because_its_parent_is(self, daemon: Daemon) -> None:
        """Dagster gives a re-execution the tags of the run that it goes on with."""
        run, _, _ = daemon.begun(daemon.requested())
        daemon.instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id}/{DEAD_PROCESS}"})
        daemon.instance.report_run_failed(run)
        parent = daemon.instance.get_run_by_id(run.run_id)
        assert parent
        again = daemon.launched(tags=parent.tags)
        daemon.tick()
        time.sleep(0.6)  # the back-off
        assert daemon.tick().reason == f"checkpoint run {again.run_id[:8]} is active"

    def test_too_often_is_left_to_a_person(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        policy = CheckpointPolicy(
            interval=EAGER.interval, backoff=pendulum.duration(microseconds=1), tolerable_failures=1
        )
        daemon = Daemon(instance, pipeline_in(tmp_path, policy=policy))
        for _ in range(2):
            run, _, _ = daemon.begun(daemon.requested())
            instance.report_run_failed(run)
        assert "mend the cause, then resume the pipeline" in str(daemon.tick().reason)
        InProcessEngine(daemon.pipeline).record(Resumed())
        assert "/attempt-3/" in str(daemon.requested().run_key)


def test_a_run_that_has_begun_is_seen_whatever_its_job_is_called(daemon: Daemon) -> None:
    daemon.tick()
    nightly = dg.define_asset_job("nightly", [dg.AssetKey(["p", name]) for name in ASSETS])
    definitions = dg.Definitions.merge(daemon.definitions, dg.Definitions(jobs=[nightly]))
    run = daemon.instance.create_run_for_job(definitions.resolve_job_def("nightly"), status=Status.STARTED)
    begin(daemon.pipeline, run.run_id)
    assert f"is being taken by run {run.run_id[:8]}" in str(daemon.tick().reason)
    daemon.instance.report_run_failed(run)
    assert f"run {run.run_id[:8]} ended before the epoch was complete" in str(daemon.tick().reason)


def test_a_run_that_ends_while_it_is_looked_at_is_not_reported_as_failed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = daemon.launched("cleanup")
    daemon.instance.add_run_tags(run.run_id, {PROCESS_TAG: f"{run.run_id}/{DEAD_PROCESS}"})

    def ends(process: str) -> bool:
        daemon.instance.handle_run_event(
            run.run_id, dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name), None
        )
        return False

    monkeypatch.setattr(runs, "lives", ends)
    bury_the_gone(daemon.instance, deployment_of(daemon.pipeline))
    ended = daemon.instance.get_run_by_id(run.run_id)
    assert ended
    assert ended.status is Status.SUCCESS


def test_while_a_run_of_an_attempt_lives_there_is_no_second_request_for_it(daemon: Daemon) -> None:
    request = daemon.requested()
    daemon.launched(tags=request.tags, status=Status.NOT_STARTED)
    for _ in range(3):
        assert daemon.tick().request is None


class TestSinks:
    def test_of_a_run_that_died_before_publishing_are_brought_up_by_the_publish_job(
        self, daemon: Daemon, tmp_path: Path
    ) -> None:
        run, engine, attempt = daemon.begun(daemon.requested())
        complete(engine, attempt)
        assert daemon.tick().reason == f"run {run.run_id[:8]} is bringing the sinks up to epoch 1"
        daemon.instance.report_run_failed(run)
        request = daemon.requested()
        assert (request.job_name, request.partition_key) == ("p_publish", None)
        assert daemon.materialized() == everywhere()
        assert daemon.launch(request).success
        tick = daemon.tick()
        assert tick.reported == [(asset, "00000001") for asset in ASSETS]
        assert tick.request
        assert tick.request.partition_key == "00000002"
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)

    def test_that_fail_are_tried_again_under_another_run_key(self, daemon: Daemon) -> None:
        engine, attempt = begin(daemon.pipeline, "a-run-that-is-gone")
        complete(engine, attempt)
        first = daemon.requested()
        work = engine.state().sinks
        assert work
        engine.record(SinksFailed(work.entry, "the table is locked"))
        second = daemon.requested()
        assert second.job_name == "p_publish"
        assert second.run_key != first.run_key

    def test_are_waited_for_while_a_run_publishes(self, daemon: Daemon) -> None:
        engine, attempt = begin(daemon.pipeline, "a-run-that-is-gone")
        complete(engine, attempt)
        run = daemon.launched("publish")
        assert daemon.tick().reason == f"checkpoint run {run.run_id[:8]} is active; the sinks are not up to epoch 1 yet"


class TestStop:
    def test_leads_to_a_last_epoch_at_once_and_then_to_rest(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        pipeline = pipeline_in(tmp_path, policy=with_interval(hours=1), source=one_cut())
        daemon = Daemon(instance, pipeline)
        take(pipeline)
        assert daemon.tick().request is None
        InProcessEngine(pipeline).record(StopRequested())
        run, engine, attempt = daemon.begun(daemon.requested())
        assert attempt.barrier.then_stop
        complete(engine, attempt)
        engine.publish()
        instance.report_run_canceled(run)
        assert daemon.tick().reason == "stopped at epoch 2; resume to go on"
        assert facts(pipeline)[-1] == "Stopped"
        assert daemon.tick().reason == "stopped at epoch 2; resume to go on"
        InProcessEngine(pipeline).record(Resumed())
        assert "due after the interval" in str(daemon.tick().reason)


class TestFaults:
    def test_of_a_tick_are_one_sentence(self, instance: dg.DagsterInstance, tmp_path: Path) -> None:
        (tmp_path / "state").write_text("a file where the state should be")
        with pytest.raises(Exception, match=r"the directory .* cannot be made") as caught:
            Daemon(instance, pipeline_in(tmp_path)).tick()
        assert "\n" not in str(caught.value)


def test_a_long_history_costs_a_tick_nothing(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    epochs = 10_000
    (tmp_path / "state" / "p").mkdir(parents=True)
    build(tmp_path / "state" / "p", epochs)
    daemon = Daemon(instance, pipeline_in(tmp_path, policy=EAGER))
    known = EpochSet(((1, epochs),))
    daemon.cursor = View("life", known).cursor
    instance.add_dynamic_partitions("p_epochs", [key_of(epoch) for epoch in known])
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        assert daemon.tick().request
        times.append(time.perf_counter() - begun)
    assert statistics.median(times) < 0.25


TICK = """
import sys
import dagster as dg
from tests.orchestration.light import pipeline
from arroyo_dagster import build_definitions

definitions = build_definitions([pipeline(sys.argv[1])])
sensor = definitions.resolve_sensor_def("light_controller")
repository = definitions.get_repository_def()
with dg.DagsterInstance.get() as instance, dg.SensorEvaluationContext(
    instance.get_ref(), None, None, None, None, repository.name, repository, instance, sensor.name
) as context:
    data = sensor.evaluate_tick(context)
loaded = {name.split(".")[0] for name in sys.modules}
print(len(data.asset_events), len(data.run_requests), *loaded & {"pyspark", "py4j"})
"""


def test_a_tick_loads_no_spark_not_even_when_it_reports_epochs(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    take(light.pipeline(str(tmp_path)), 2)
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home")}
    ended = subprocess.run(
        [sys.executable, "-c", TICK, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["4", "1"]


def test_a_cursor_that_is_not_ours_is_as_good_as_none(daemon: Daemon) -> None:
    take(daemon.pipeline)
    for cursor in ("", "nonsense", "[]", json.dumps({"life": 3, "epochs": None}), '{"life": "x"}'):
        daemon.cursor = cursor
        daemon.instance.wipe_assets([dg.AssetKey(["p", name]) for name in ASSETS])
        assert daemon.tick().reported == [(asset, "00000001") for asset in ASSETS], cursor


def test_an_aborted_attempt_tells_who_declared_it_dead(daemon: Daemon) -> None:
    run, _, _ = daemon.begun(daemon.requested())
    daemon.instance.report_run_failed(run)
    daemon.tick()
    last = history(daemon.pipeline)[-1]
    assert isinstance(last.fact, CheckpointAborted)
    assert last.writer.startswith("controller/")


def test_pipelines_of_two_instances_do_not_get_two_epochs_at_once(
    instance: dg.DagsterInstance, another_instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """To each of them the other's runs are gone; the log sees to it that only one attempt can complete."""
    here, there = Daemon(instance, pipeline_in(tmp_path)), Daemon(another_instance, pipeline_in(tmp_path))
    _, engine, attempt = here.begun(here.requested())
    there.begun(there.requested())
    complete(engine, attempt)
    assert facts(here.pipeline)[1:] == ["CheckpointStarted", "CheckpointAborted", "CheckpointStarted"]
