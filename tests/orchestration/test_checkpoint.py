"""Checkpoint runs on a real Spark and a real Dagster."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from arroyo_dagster import Pipeline
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import open_store
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    SinksFailed,
    StopRequested,
)
from arroyo_dagster.model import EpochSet, ObjectPath
from arroyo_dagster.orchestration.metadata import KEYS
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.testing import InProcessEngine
from tests.orchestration.doubles import MEDDLERS, FragileSink, FragileTotal, MeddledSource
from tests.orchestration.helpers import (
    ASSETS,
    CUTS,
    ROWS,
    Daemon,
    begin,
    everywhere,
    expected_output,
    facts,
    history,
    output,
    pipeline_in,
    state_of,
    take,
    why,
    why_of,
)
from tests.orchestration.test_metadata import problems_of

pytestmark = pytest.mark.usefixtures("spark")

FLAG, WAREHOUSE = "flag", "warehouse is closed"


@pytest.fixture
def daemon(instance: dg.DagsterInstance, tmp_path: Path) -> Daemon:
    return Daemon(instance, pipeline_in(tmp_path))


def steps_of(events: Any) -> list[str]:
    """The steps that have succeeded, without the name of the graph."""
    return [event.step_key.rpartition(".")[2] for event in events if event.is_step_success]


def handovers(pipeline: Pipeline) -> list[str]:
    store = open_store(str(pipeline.state_url)).below(pipeline.name)
    return [str(path) for path in store.names(ObjectPath("handovers"))]


class TestEpochs:
    def test_are_taken_one_after_the_other_and_their_output_is_right(self, daemon: Daemon, tmp_path: Path) -> None:
        results = [daemon.launch(daemon.requested()) for _ in CUTS]
        assert all(result.success for result in results)
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", len(CUTS))
        assert daemon.materialized() == everywhere(1, 2, 3)
        assert daemon.keys() == ["00000001", "00000002", "00000003"]
        assert handovers(daemon.pipeline) == []
        assert InProcessEngine(daemon.pipeline).verify() == []
        self.look_at_materializations(results[-1])
        self.look_at_checks(results[-1])
        quiet = daemon.tick()  # what runs have reported is not reported again
        assert quiet.reported == []
        assert steps_of(results[-1].all_events) == ["begin_epoch", "raw", "stats", "totals", "commit_epoch"]

    def look_at_materializations(self, result: dg.ExecuteInProcessResult) -> None:
        events = {event.asset_key.path[-1]: event for event in result.get_asset_materialization_events()}  # type: ignore[union-attr]
        assert set(events) == set(ASSETS)
        for name, event in events.items():
            assert event.partition == "00000003", name
            metadata = event.materialization.metadata
            assert problems_of(metadata) == []
            assert metadata["arroyo/epoch"].value == 3
            assert metadata["arroyo/epoch_ms"].value > 0  # type: ignore[operator]
        totals, raw = (events[name].materialization.metadata for name in ("totals", "raw"))
        assert totals["arroyo/rows_in"].value == CUTS[2] - CUTS[1] == raw["arroyo/rows_out"].value
        assert totals["arroyo/metric/rows seen"].value == CUTS[2] - CUTS[1]
        found = {key.removeprefix("arroyo/") for event in events.values() for key in event.materialization.metadata}
        documented = {key for key in KEYS if "<" not in key} - {"replay"}
        assert documented <= found  # nothing is documented that does not occur

    def look_at_checks(self, result: dg.ExecuteInProcessResult) -> None:
        evaluated = {(check.asset_key.path[-1], check.check_name) for check in result.get_asset_check_evaluations()}
        of_operators = {"aligned", "files_whole", "watermark_monotonic", "state_chain"}
        of_sinks = {("running", "rows_conserved"), ("windows", "rows_conserved")}
        on_all = {(asset, "replay_identical") for asset in ASSETS}
        assert (
            evaluated == {(name, check) for name in ("totals", "stats") for check in of_operators} | of_sinks | on_all
        )
        for check in result.get_asset_check_evaluations():
            assert check.passed, (check.check_name, check.description)

    def test_taken_from_an_asset_page_are_the_same(self, daemon: Daemon, instance: dg.DagsterInstance) -> None:
        instance.add_dynamic_partitions("p_epochs", ["00000001"])
        job = daemon.definitions.resolve_implicit_global_asset_job_def()
        result = job.execute_in_process(
            instance=instance,
            partition_key="00000001",
            asset_selection=[dg.AssetKey(["p", name]) for name in ASSETS],
        )
        assert result.success
        assert daemon.materialized() == everywhere(1)
        assert state_of(daemon.pipeline).head == 1

    def test_behind_a_stop_is_the_last(self, daemon: Daemon) -> None:
        assert daemon.launch(daemon.requested()).success
        InProcessEngine(daemon.pipeline).record(StopRequested())
        assert daemon.launch(daemon.requested()).success
        assert daemon.tick().reason == "stopped at epoch 2; resume to go on"
        assert why(daemon.run("checkpoint", "00000003")) == (
            "epoch 3 of pipeline 'p' cannot be taken now: stopped at epoch 2; resume to go on"
        )


class TestWrongPartition:
    def refused(self, daemon: Daemon, partition: str | None) -> str:
        take(daemon.pipeline)
        before = state_of(daemon.pipeline)
        sentence = why(daemon.run("checkpoint", partition))
        assert state_of(daemon.pipeline) == before
        assert daemon.materialized() == everywhere()
        return sentence

    def test_of_an_epoch_that_is_far_away(self, daemon: Daemon) -> None:
        assert self.refused(daemon, "00000009") == (
            "pipeline 'p' has no epoch 9; the next one is 2, and those that are kept are 1"
        )

    @pytest.mark.parametrize("partition", ["hello", "2", "00000000", "-0000002"])
    def test_that_is_no_epoch(self, daemon: Daemon, partition: str) -> None:
        assert self.refused(daemon, partition) == (
            f"the partition {partition!r} is no epoch of pipeline 'p': epoch 1 is 00000001"
        )

    def test_that_is_none(self, daemon: Daemon) -> None:
        assert self.refused(daemon, None) == (
            "an epoch of pipeline 'p' is a partition: launch the job for the next one to take it, or for existing "
            "ones to replay them"
        )

    def test_of_an_epoch_that_exists_replays_it(self, daemon: Daemon, tmp_path: Path) -> None:
        take(daemon.pipeline, 2)
        shown = output(tmp_path)
        assert daemon.run("checkpoint", "00000002").success
        assert facts(daemon.pipeline)[-2:] == ["ReplayStarted", "ReplayFinished"]
        assert state_of(daemon.pipeline).verified == EpochSet.of([2])
        assert output(tmp_path) == shown
        assert {key for keys in daemon.materialized().values() for key in keys} == {"00000002"}

    def test_of_an_epoch_that_cleaning_has_removed(self, daemon: Daemon) -> None:
        take(daemon.pipeline, 3)
        assert daemon.run("cleanup", config={"keep_last": 1}).success  # and epoch 2, which a replay would start from
        assert "pipeline 'p' has no epoch 1; the next one is 4" in why(daemon.run("checkpoint", "00000001"))


class TestFailure:
    @pytest.fixture
    def daemon(self, instance: dg.DagsterInstance, tmp_path: Path) -> Daemon:
        (tmp_path / FLAG).touch()
        return Daemon(instance, pipeline_in(tmp_path, operator=FragileTotal(tmp_path / FLAG)))

    def test_of_a_stage_is_one_sentence_and_leaves_no_trace_but_an_abort_that_another_attempt_follows(
        self, daemon: Daemon, tmp_path: Path
    ) -> None:
        result = daemon.launch(daemon.requested())
        assert re.fullmatch(
            r"operator 'totals', subtask \d: process_batch raised ZeroDivisionError: as it was told", why(result)
        )
        assert facts(daemon.pipeline) == ["PipelineCreated", "CheckpointStarted", "CheckpointAborted"]
        aborted = history(daemon.pipeline)[-1].fact
        assert isinstance(aborted, CheckpointAborted)
        assert aborted.reason == why(result)
        assert daemon.materialized() == everywhere()
        (tmp_path / FLAG).unlink()
        assert daemon.launch(daemon.requested()).success
        begun = [entry.fact for entry in history(daemon.pipeline) if isinstance(entry.fact, CheckpointStarted)]
        assert [fact.attempt for fact in begun] == [1, 2]
        assert begun[0].plan == begun[1].plan
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)
        assert daemon.materialized() == everywhere(1)


def fragile_pipeline(directory: str) -> Pipeline:
    """Dagster takes its stages in the order of their names: raw and stats, and then totals, which may fail."""
    place = Path(directory)
    sink, source = FragileSink(str(place / "out" / "running"), place / WAREHOUSE), MeddledSource(ROWS, CUTS)
    source.meddler = directory
    return pipeline_in(place, source=source, operator=FragileTotal(place / FLAG), sink=sink)


def fail() -> None:
    raise StorageError("the source is not there")


def fragile_job(directory: str) -> dg.JobDefinition:
    from arroyo_dagster import build_definitions  # noqa: PLC0415

    return build_definitions([fragile_pipeline(directory)]).resolve_job_def("p_checkpoint")


class TestReexecution:
    @pytest.fixture
    def daemon(self, instance: dg.DagsterInstance, tmp_path: Path) -> Daemon:
        return Daemon(instance, fragile_pipeline(str(tmp_path)))

    @pytest.fixture
    def again(self, instance: dg.DagsterInstance, tmp_path: Path) -> Iterator[Any]:
        """Execute a run again from where it failed, as the button does: with the tags of its parent."""
        job = dg.build_reconstructable_job("tests.orchestration.test_checkpoint", "fragile_job", (str(tmp_path),))

        def execute(run_id: str) -> dg.JobExecutionResult:
            parent = instance.get_run_by_id(run_id)
            assert parent
            options = dg.ReexecutionOptions.from_failure(run_id, instance)
            return dg.execute_job(job, instance, tags=dict(parent.tags), reexecution_options=options)

        yield execute  # noqa: PT022 - the type of a fixture's function

    def test_runs_only_what_is_missing_and_commits_as_a_second_attempt(
        self, daemon: Daemon, again: Any, tmp_path: Path
    ) -> None:
        (tmp_path / FLAG).touch()
        failed = daemon.launch(daemon.requested())
        done = steps_of(failed.all_events)
        assert done == ["begin_epoch", "raw", "stats"]
        (tmp_path / FLAG).unlink()
        with again(failed.run_id) as result:
            assert result.success
            assert set(steps_of(result.all_events)) == {"begin_epoch", "totals", "stats", "raw", "commit_epoch"} - {
                *done
            }
        begun = [entry.fact for entry in history(daemon.pipeline) if isinstance(entry.fact, CheckpointStarted)]
        assert [fact.attempt for fact in begun] == [1, 2]
        assert begun[0].plan == begun[1].plan
        assert state_of(daemon.pipeline).attempt_of(1) == 2
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)
        assert daemon.materialized() == everywhere(1)
        assert handovers(daemon.pipeline) == []
        assert InProcessEngine(daemon.pipeline).verify() == []
        assert daemon.tick().reported == []

    def test_that_fails_again_gives_its_own_attempt_up_and_says_why(
        self, daemon: Daemon, again: Any, tmp_path: Path
    ) -> None:
        (tmp_path / FLAG).touch()
        failed = daemon.launch(daemon.requested())
        with again(failed.run_id) as result:
            assert not result.success
        aborted = [entry.fact for entry in history(daemon.pipeline) if isinstance(entry.fact, CheckpointAborted)]
        assert [(fact.attempt, "as it was told" in fact.reason) for fact in aborted] == [(1, True), (2, True)]

    def test_of_a_run_whose_sink_failed_publishes_and_materializes(
        self, daemon: Daemon, again: Any, tmp_path: Path
    ) -> None:
        (tmp_path / WAREHOUSE).touch()
        failed = daemon.launch(daemon.requested())
        assert not failed.success
        assert "CheckpointCompleted" in facts(daemon.pipeline)
        assert daemon.materialized() == everywhere()
        (tmp_path / WAREHOUSE).unlink()
        with again(failed.run_id) as result:
            assert result.success
            assert steps_of(result.all_events) == ["commit_epoch"]
        assert daemon.materialized() == everywhere(1)
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)
        assert daemon.tick().reported == []
        assert facts(daemon.pipeline).count("CheckpointStarted") == 1

    def test_after_somebody_else_has_taken_the_epoch_is_refused(
        self, daemon: Daemon, again: Any, tmp_path: Path
    ) -> None:
        MEDDLERS[str(tmp_path)] = fail
        failed = daemon.launch(daemon.requested())
        assert why(failed) == "the source is not there"
        take(daemon.pipeline)
        before = state_of(daemon.pipeline)
        with again(failed.run_id) as result:
            assert not result.success
            assert why_of(result.all_events) == "epoch 1 was completed by attempt 2; there is nothing left to do"
        assert state_of(daemon.pipeline) == before
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)

    def test_of_a_run_that_is_long_gone_finds_nothing_to_go_on_with(
        self, daemon: Daemon, again: Any, tmp_path: Path
    ) -> None:
        MEDDLERS[str(tmp_path)] = fail
        failed = daemon.launch(daemon.requested())
        assert why(failed) == "the source is not there"
        store = open_store(str(daemon.pipeline.state_url)).below("p")
        for path in handovers(daemon.pipeline):
            store.delete(ObjectPath(path))
        with again(failed.run_id) as result:
            assert f"there is nothing from p_epoch.begin_epoch of run {failed.run_id[:8]}, because" in why_of(
                result.all_events
            )
        assert "CheckpointCompleted" not in facts(daemon.pipeline)


def test_a_sink_that_fails_leaves_an_epoch_that_the_controller_brings_to_its_end(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    daemon = Daemon(instance, fragile_pipeline(str(tmp_path)))
    (tmp_path / WAREHOUSE).touch()
    result = daemon.launch(daemon.requested())
    assert "the warehouse is closed" in str([event for event in result.all_events if event.is_step_failure])
    assert facts(daemon.pipeline)[-2:] == ["CheckpointCompleted", "SinksFailed"]
    failed = history(daemon.pipeline)[-1].fact
    assert isinstance(failed, SinksFailed)
    assert failed.reason == "OSError: the warehouse is closed"
    (tmp_path / WAREHOUSE).unlink()
    request = daemon.requested()
    assert request.job_name == "p_publish"
    assert daemon.launch(request).success
    assert daemon.tick().reported == [(asset, "00000001") for asset in ASSETS]
    assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)


class TestTwoRunsAtOnce:
    """The second one runs while the first is between its beginning and its first stage."""

    @pytest.fixture
    def daemon(self, instance: dg.DagsterInstance, tmp_path: Path) -> Iterator[Daemon]:
        source = MeddledSource(ROWS, CUTS)
        source.meddler = str(tmp_path)
        yield Daemon(instance, pipeline_in(tmp_path, source=source))
        MEDDLERS.clear()

    def test_of_one_epoch_are_one_too_many_and_nothing_is_doubled(self, daemon: Daemon, tmp_path: Path) -> None:
        others: list[dg.ExecuteInProcessResult] = []
        MEDDLERS[str(tmp_path)] = lambda: in_thread(lambda: others.append(daemon.run("checkpoint", "00000001")))
        first = daemon.launch(daemon.requested())
        assert first.success
        assert why(others[0]).startswith(
            f"epoch 1 of pipeline 'p' cannot be taken now: epoch 1, attempt 1, is being taken by run "
            f"{first.run_id[:8]} for"
        )
        self.nothing_is_doubled(daemon, tmp_path)

    def test_of_which_the_first_was_taken_for_dead_are_one_too_many(self, daemon: Daemon, tmp_path: Path) -> None:
        others: list[dg.ExecuteInProcessResult] = []

        def give_up_and_start_over() -> None:
            [record] = daemon.instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
            daemon.instance.report_run_failed(record.dagster_run)
            others.append(daemon.run("checkpoint", "00000001"))

        MEDDLERS[str(tmp_path)] = lambda: in_thread(give_up_and_start_over)
        first = daemon.launch(daemon.requested())
        assert others[0].success
        assert why(first) == "epoch 1 was completed by attempt 2; there is nothing left to do"
        self.nothing_is_doubled(daemon, tmp_path)

    def nothing_is_doubled(self, daemon: Daemon, tmp_path: Path) -> None:
        completed = [entry.fact for entry in history(daemon.pipeline) if isinstance(entry.fact, CheckpointCompleted)]
        assert len(completed) == 1
        assert output(tmp_path) == expected_output(tmp_path / "undisturbed", 1)
        assert daemon.materialized() == everywhere(1)
        assert InProcessEngine(daemon.pipeline).verify() == []


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_run_finishes_what_others_have_left(daemon: Daemon, tmp_path: Path) -> None:
    begin(daemon.pipeline, "a-run-that-is-gone")
    assert daemon.run("checkpoint", "00000001").success
    assert facts(daemon.pipeline) == [
        "PipelineCreated",
        "CheckpointStarted",
        "CheckpointAborted",
        "CheckpointStarted",
        "CheckpointCompleted",
        "SinksCommitted",
    ]


def test_a_pipeline_without_an_operator_has_epochs_too(
    spark: SparkSession, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
    source = MeddledSource(ROWS, CUTS)
    pipeline.source("rows", source).where("v >= 0").sink("raw", ParquetSink(str(tmp_path / "out" / "raw")))
    daemon = Daemon(instance, pipeline)
    result = daemon.launch(daemon.requested())
    assert result.success
    assert [event.asset_key for event in result.get_asset_materialization_events()] == [dg.AssetKey(["p", "raw"])]
    assert len(output(tmp_path)["raw"]) == CUTS[0]
