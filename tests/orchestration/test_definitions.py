"""What `build_definitions` makes of pipelines, and what it refuses."""

from pathlib import Path
from typing import Any

import dagster as dg
import pendulum
import pytest

from arroyo_dagster import CheckpointPolicy, Pipeline, SparkResource, agg, build_definitions
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.testing import TableSource
from tests.engine.operators import Forget
from tests.orchestration.helpers import CUTS, ROWS, TOTALS, pipeline_in, with_interval
from tests.orchestration.test_translator import identity


def ops_of(definitions: dg.Definitions, job: str = "p_checkpoint") -> dict[str, set[str]]:
    """The ops of the checkpoint graph, and which others each waits for."""
    [graph] = definitions.resolve_job_def(job).nodes
    assert isinstance(graph.definition, dg.GraphDefinition)
    invoked = graph.definition.dependencies
    return {
        node.alias or node.name: {
            upstream.node for upstream in inputs.values() if isinstance(upstream, dg.DependencyDefinition)
        }
        for node, inputs in invoked.items()
        if isinstance(node, dg.NodeInvocation)
    }


_JOBS = ("checkpoint", "publish", "replay", "rewind", "pin", "stop", "resume", "cleanup")


class TestOfOnePipeline:
    @pytest.fixture
    def definitions(self, tmp_path: Path) -> dg.Definitions:
        return build_definitions([pipeline_in(tmp_path, policy=with_interval(minutes=1))])

    def test_there_is_a_job_for_all_that_people_do(self, definitions: dg.Definitions) -> None:
        names = {job.name for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")}
        assert names == {f"p_{job}" for job in _JOBS}
        for name in names:
            assert definitions.resolve_job_def(name).tags["arroyo_dagster/pipeline"] == "p"
            assert definitions.resolve_job_def(name).description

    def test_what_is_launched_from_an_asset_runs_in_one_process_like_the_job(self, definitions: dg.Definitions) -> None:
        for job in (definitions.resolve_implicit_global_asset_job_def(), definitions.resolve_job_def("p_checkpoint")):
            assert job.executor_def.name == "in_process"

    def test_the_controller_is_on_from_the_beginning_and_looks_often_enough(self, definitions: dg.Definitions) -> None:
        sensor = definitions.resolve_sensor_def("p_controller")
        assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
        assert sensor.minimum_interval_seconds == 10  # for an interval of a minute
        assert "every 1 minute" in str(sensor.description)

    @pytest.mark.parametrize(("interval", "seconds"), [({"seconds": 1}, 5), ({"hours": 6}, 30), ({"seconds": 90}, 15)])
    def test_the_time_between_ticks_follows_the_interval(
        self, tmp_path: Path, interval: dict[str, float], seconds: int
    ) -> None:
        definitions = build_definitions([pipeline_in(tmp_path, policy=with_interval(**interval))])
        assert definitions.resolve_sensor_def("p_controller").minimum_interval_seconds == seconds

    def test_cleaning_is_scheduled_from_the_beginning(self, definitions: dg.Definitions) -> None:
        schedule = definitions.resolve_schedule_def("p_cleanup_schedule")
        assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
        assert schedule.cron_schedule == "*/10 * * * *"
        assert schedule.job_name == "p_cleanup"

    def test_a_pipeline_may_say_when_it_is_cleaned(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path), cleanup_schedule="0 3 * * *")
        pipeline.source("rows", TableSource(ROWS, CUTS)).sink("out", ParquetSink(str(tmp_path / "out")))
        schedule = build_definitions([pipeline]).resolve_schedule_def("p_cleanup_schedule")
        assert schedule.cron_schedule == "0 3 * * *"

    def test_nothing_is_opened_or_made(self, definitions: dg.Definitions, tmp_path: Path) -> None:
        definitions.resolve_job_def("p_checkpoint")
        dg.Definitions.validate_loadable(definitions)
        assert list(tmp_path.iterdir()) == []

    def test_the_jobs_tell_in_the_launchpad_what_they_want(self, definitions: dg.Definitions) -> None:
        for job, fields in {
            "cleanup": {"dry_run", "keep_last", "keep_within", "hourly", "daily"},
            "rewind": {"epoch"},
            "pin": {"epoch", "label", "unpin"},
            "replay": {"epochs"},
        }.items():
            [op] = definitions.resolve_job_def(f"p_{job}").nodes
            schema: Any = op.definition.config_schema
            found = schema.as_field().config_type.fields
            assert set(found) == fields
            assert all(described.description for described in found.values())


class TestTheCheckpointGraph:
    def test_follows_the_dataflow(self, tmp_path: Path) -> None:
        assert ops_of(build_definitions([pipeline_in(tmp_path)])) == {
            "begin_epoch": set(),
            "totals": {"begin_epoch"},
            "stats": {"begin_epoch"},
            "raw": {"begin_epoch"},
            "commit_epoch": {"begin_epoch", "totals", "stats", "raw"},
        }

    def test_has_a_stage_behind_those_that_it_reads(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        one = pipeline.source("one", TableSource(ROWS, CUTS), event_time="t")
        two = pipeline.source("two", TableSource(ROWS, CUTS), event_time="t")
        seen = one.process("seen", Forget(), two, schema=TOTALS)
        again = seen.where("total > 3").key_by("k").process("again", Forget(), schema=TOTALS)
        seen.where("total > 3").sink("filtered", ParquetSink(str(tmp_path / "filtered")))
        again.map_batches(identity).union(seen).sink("both", ParquetSink(str(tmp_path / "both")))
        again.map_batches(identity).sink("mapped", ParquetSink(str(tmp_path / "mapped")))
        assert ops_of(build_definitions([pipeline])) == {
            "begin_epoch": set(),
            "seen": {"begin_epoch"},
            "again": {"begin_epoch", "seen"},
            "filtered": {"begin_epoch", "seen"},
            "both": {"begin_epoch", "again", "seen"},
            "commit_epoch": {"begin_epoch", "seen", "again", "filtered", "both"},
        }

    def test_of_a_pipeline_without_an_operator_is_its_sinks(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        pipeline.source("rows", TableSource(ROWS, CUTS)).sink("out", ParquetSink(str(tmp_path / "out")))
        assert ops_of(build_definitions([pipeline])) == {
            "begin_epoch": set(),
            "out": {"begin_epoch"},
            "commit_epoch": {"begin_epoch", "out"},
        }


def test_two_pipelines_share_nothing_but_spark(tmp_path: Path) -> None:
    definitions = build_definitions([pipeline_in(tmp_path, "one"), pipeline_in(tmp_path, "two")])
    dg.Definitions.validate_loadable(definitions)
    assert ops_of(definitions, "one_checkpoint") == ops_of(definitions, "two_checkpoint")
    keys = definitions.resolve_all_asset_keys()
    assert len(keys) == len(set(keys)) == 2 * 7
    for name in ("one", "two"):
        selected = definitions.resolve_job_def(f"{name}_checkpoint").asset_layer.executable_asset_keys
        assert {key.path[0] for key in selected} == {name}
    assert set(definitions.get_repository_def().get_top_level_resources()) == {
        "arroyo_spark",
        "one_handover",
        "two_handover",
    }


def test_definitions_of_ones_own_can_be_merged_in(tmp_path: Path) -> None:
    @dg.asset(deps=[dg.AssetKey(["p", "windows"])])
    def report() -> None:
        """Made of what a sink shows."""

    merged = dg.Definitions.merge(build_definitions([pipeline_in(tmp_path)]), dg.Definitions(assets=[report]))
    dg.Definitions.validate_loadable(merged)
    assert merged.resolve_asset_graph().get(dg.AssetKey("report")).parent_keys == {dg.AssetKey(["p", "windows"])}


def test_the_given_spark_is_what_runs_get(tmp_path: Path) -> None:
    spark = SparkResource(remote="sc://localhost:15002")
    definitions = build_definitions([pipeline_in(tmp_path)], spark=spark)
    assert (definitions.resources or {})["arroyo_spark"] is spark


class TestRefused:
    def sentence(self, *pipelines: Pipeline, **options: Any) -> str:
        with pytest.raises(ConfigurationError) as refused:
            build_definitions(pipelines, **options)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    def test_two_pipelines_of_one_name(self, tmp_path: Path) -> None:
        pipelines = [pipeline_in(tmp_path), pipeline_in(tmp_path, "other"), pipeline_in(tmp_path)]
        assert self.sentence(*pipelines) == "there are two pipelines named 'p': give one of them another name"

    def test_storage_of_an_unknown_kind(self, tmp_path: Path) -> None:
        pipeline = pipeline_in(tmp_path)
        pipeline.state_url = None
        assert "the storage 'ftp://host/state' is neither a directory nor a URL" in self.sentence(
            pipeline, state_url="ftp://host/state"
        )

    def test_state_in_memory(self, tmp_path: Path) -> None:
        pipeline = pipeline_in(tmp_path)
        pipeline.state_url = "memory://"
        assert self.sentence(pipeline) == ("pipeline 'p': its state cannot be in memory://, which ends with a run")

    @pytest.mark.parametrize("name", ["begin_epoch", "commit_epoch"])
    def test_a_node_with_the_name_of_one_of_our_ops(self, tmp_path: Path, name: str) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        stream = pipeline.source("rows", TableSource(ROWS, CUTS))
        stream.key_by("k").process(name, Forget()).sink("out", ParquetSink(str(tmp_path / "out")))
        assert self.sentence(pipeline) == (
            f"pipeline 'p': {name!r} is what every checkpoint run calls one of its own ops; "
            "give the operator or sink another name"
        )

    def test_a_schedule_that_is_none(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path), cleanup_schedule="every day")
        pipeline.source("rows", TableSource(ROWS, CUTS)).sink("out", ParquetSink(str(tmp_path / "out")))
        assert self.sentence(pipeline) == (
            "pipeline 'p': its cleanup_schedule must be in cron's words, such as '*/10 * * * *', not 'every day'"
        )

    def test_a_pipeline_that_is_not_whole(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        pipeline.source("rows", TableSource(ROWS, CUTS))
        assert "the source 'rows' leads nowhere" in self.sentence(pipeline)

    @pytest.mark.parametrize("interval", [-5, 0])
    def test_an_interval_that_is_not_one(self, interval: int) -> None:
        with pytest.raises(ConfigurationError, match="interval must be more than zero"):
            CheckpointPolicy(interval=pendulum.duration(seconds=interval))
        with pytest.raises(ConfigurationError, match="interval must be"):
            Pipeline("p", checkpoint_interval=f"{interval} seconds")


def test_a_sink_may_have_the_name_of_one_of_our_ops_where_it_is_no_op(tmp_path: Path) -> None:
    pipeline = Pipeline("p", state_url=str(tmp_path))
    stream = pipeline.source("rows", TableSource(ROWS, CUTS), event_time="t")
    stats = stream.key_by("k").tumble("10 seconds").aggregate("stats", n=agg.count())
    stats.sink("begin_epoch", ParquetSink(str(tmp_path / "out")))
    definitions = build_definitions([pipeline])
    dg.Definitions.validate_loadable(definitions)
    assert dg.AssetKey(["p", "begin_epoch"]) in definitions.resolve_all_asset_keys()
