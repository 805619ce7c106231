"""A pipeline with a bit of everything, and what Dagster's daemon does with its sensor."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pendulum
import pyarrow as pa
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from arroyo_dagster import CheckpointPolicy, Pipeline, Retention, agg, build_definitions
from arroyo_dagster.engine import Engine
from arroyo_dagster.log import Creation, Log, PipelineState, open_store
from arroyo_dagster.log.entries import Entry
from arroyo_dagster.orchestration.deployment import Deployment, key_of
from arroyo_dagster.orchestration.translator import Translator, specs_of
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.operators import RunningTotal
from tests.engine.test_pipelines import rows, shown

ROWS = rows(120, keys=5, seconds=60)
CUTS = (40, 80, 120)
TOTALS = pa.schema([("k", pa.string()), ("total", pa.int64()), ("epoch", pa.int64())])
ASSETS = ("totals", "stats", "running", "stats_late", "windows", "raw")
"""Of these there are epochs: operators and sinks, in the order in which they were declared."""

EAGER = CheckpointPolicy(
    interval=pendulum.duration(microseconds=1), backoff=pendulum.duration(milliseconds=500), tolerable_failures=5
)
"""An epoch is always due, and nobody waits for long after a failure."""


def pipeline_in(
    directory: Path,
    name: str = "p",
    *,
    policy: CheckpointPolicy = EAGER,
    retention: Retention | None = None,
    source: TableSource | None = None,
    operator: RunningTotal | None = None,
    sink: ParquetSink | None = None,
) -> Pipeline:
    """Two operators, of which one is a window that has a sink for late rows, and a sink that takes rows as they are."""
    pipeline = Pipeline(name, state_url=str(directory / "state"), parallelism=2, policy=policy, retention=retention)
    out = directory / "out"
    stream = pipeline.source("rows", source or TableSource(ROWS, CUTS), event_time="t", watermark_delay="2 seconds")
    totals = stream.key_by("k").process("totals", operator or RunningTotal(), schema=TOTALS)
    totals.sink("running", sink or ParquetSink(str(out / "running")))
    windowed = stream.key_by("k").tumble("10 seconds")
    late = ParquetSink(str(out / "late"))
    stats = windowed.aggregate("stats", late_to=late, n=agg.count(), top=agg.max("v"))
    stats.sink("windows", ParquetSink(str(out / "windows")))
    stream.sink("raw", ParquetSink(str(out / "raw")))
    return pipeline


def deployment_of(pipeline: Pipeline, translator: Translator | None = None) -> Deployment:
    return Deployment(pipeline, pipeline.graph(), None, specs_of(pipeline, translator or Translator()))


def take(pipeline: Pipeline, count: int = 1, **options: Any) -> PipelineState:
    """Take epochs outside Dagster and without Spark."""
    engine = InProcessEngine(pipeline, **options)
    for _ in range(count):
        taken = engine.run_epoch(policy=pipeline.policy.at_once())
        assert not hasattr(taken, "reason"), taken
    return engine.state()


def complete(engine: Engine, attempt: Attempt) -> None:
    """Commit an attempt, and leave it to others to publish."""
    reports: dict[str, StageReport] = {}
    for stage in engine.stages:
        reports[stage.name] = engine.run_stage(attempt, stage.name, reports)
    engine.complete(attempt, list(reports.values()))


def begin(pipeline: Pipeline, run_id: str | None = None) -> tuple[Engine, Attempt]:
    """Put an attempt into flight."""
    engine = InProcessEngine(pipeline, run_id=run_id)
    attempt = engine.begin()
    assert isinstance(attempt, Attempt), attempt
    return engine, attempt


def history(pipeline: Pipeline) -> list[Entry]:
    """Everything that the log says."""
    assert pipeline.state_url
    store = open_store(pipeline.state_url).below(pipeline.name)
    return list(Log(store, "test").entries())


def facts(pipeline: Pipeline) -> list[str]:
    return [type(entry.fact).__name__ for entry in history(pipeline)]


def state_of(pipeline: Pipeline) -> PipelineState:
    return Engine(pipeline).state()


def output(directory: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What the sinks show."""
    return {sink: shown(directory / "out" / sink) for sink in ("running", "windows", "late", "raw")}


def expected_output(
    directory: Path, epochs: int, source: TableSource | None = None
) -> dict[str, list[tuple[Any, ...]]]:
    """What the sinks show after so many epochs that nothing has ever disturbed, held against DuckDB."""
    take(pipeline_in(directory, source=source), epochs)
    found = output(directory)
    rows_so_far = ROWS.slice(0, CUTS[min(epochs, len(CUTS)) - 1])
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("input", rows_so_far)
        assert found["raw"] == connection.execute("SELECT * FROM input ORDER BY ALL").fetchall()
        totals = connection.execute("SELECT k, sum(v) FROM input GROUP BY k ORDER BY k").fetchall()
    assert sorted({k: total for k, total, _ in sorted(found["running"], key=lambda row: row[2])}.items()) == totals
    assert found["windows"]
    return found


# A run that queues has to say where its code is. Dagster has no public way to make one.
_ORIGIN = RemoteJobOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "repository"), "job")


@dataclass(frozen=True, slots=True)
class Tick:
    """What one evaluation of the sensor has said."""

    request: dg.RunRequest | None
    reason: str | None
    reported: list[tuple[str, str]]
    added: list[str]
    deleted: list[str]


@dataclass
class Daemon:
    """Does with a pipeline's sensor what Dagster's daemon does, but launches nothing by itself."""

    instance: dg.DagsterInstance
    pipeline: Pipeline
    definitions: dg.Definitions = field(init=False)
    cursor: str | None = None
    run_keys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.definitions = build_definitions([self.pipeline])

    @property
    def name(self) -> str:
        return self.pipeline.name

    def tick(self) -> Tick:
        sensor = self.definitions.resolve_sensor_def(f"{self.name}_controller")
        repository = self.definitions.get_repository_def()
        with dg.SensorEvaluationContext(
            instance_ref=self.instance.get_ref(),
            instance=self.instance,
            last_tick_completion_time=None,
            last_run_key=None,
            cursor=self.cursor,
            log_key=None,
            repository_name=repository.name,
            repository_def=repository,
            sensor_name=sensor.name,
        ) as context:
            data = sensor.evaluate_tick(context)
        added, deleted = list[str](), list[str]()
        for asked in data.dynamic_partitions_requests or ():
            keys = list(asked.partition_keys)
            if isinstance(asked, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions(asked.partitions_def_name, keys)
                added += keys
            else:
                for key in keys:
                    self.instance.delete_dynamic_partition(asked.partitions_def_name, key)
                deleted += keys
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        self.cursor = data.cursor
        requests = list(data.run_requests or ())
        assert len(requests) <= 1
        reported = [(event.asset_key.path[-1], str(event.partition)) for event in data.asset_events]
        return Tick(requests[0] if requests else None, data.skip_message, reported, added, deleted)

    def ticks_until(self, done: Callable[[Tick], bool]) -> Tick:
        deadline = time.monotonic() + 20
        while not done(tick := self.tick()):
            assert time.monotonic() < deadline, tick
            time.sleep(0.05)
        return tick

    def requested(self) -> dg.RunRequest:
        """What is asked for once every wait is over."""
        request = self.ticks_until(lambda tick: tick.request is not None).request
        assert request
        return request

    def launch(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        """Run what was asked for, in this process. Dagster would pass over a run key that it has seen before."""
        assert request.job_name
        assert request.run_key not in self.run_keys
        self.run_keys.append(str(request.run_key))
        return self.run(request.job_name.removeprefix(f"{self.name}_"), request.partition_key, tags=request.tags)

    def run(
        self,
        job: str,
        partition: str | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        """Run a job as somebody would who launches it by hand."""
        definition = self.definitions.resolve_job_def(f"{self.name}_{job}")
        ops = {node.name: {"config": dict(config)} for node in definition.nodes} if config is not None else {}
        if partition is not None:
            self.instance.add_dynamic_partitions(f"{self.name}_epochs", [partition])
        return definition.execute_in_process(
            run_config={"ops": ops} if ops else None,
            instance=self.instance,
            partition_key=partition,
            tags=dict(tags or {}),
            raise_on_error=False,
        )

    def launched(
        self,
        job: str = "checkpoint",
        status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED,
        epoch: int | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.DagsterRun:
        """A run that Dagster has noted, and that does nothing."""
        partition = {} if epoch is None else {"dagster/partition": key_of(epoch)}
        definition = self.definitions.resolve_job_def(f"{self.name}_{job}")
        config = {"rewind": {"epoch": 1}, "pin": {"epoch": 1}, "replay": {"epochs": "1"}}.get(job)
        ops = {node.name: {"config": config} for node in definition.nodes} if config else {}
        return self.instance.create_run_for_job(
            definition,
            run_config={"ops": ops} if ops else None,
            status=status,
            tags={**partition, **(tags or {})},
            remote_job_origin=_ORIGIN,
        )

    def begun(self, request: dg.RunRequest) -> tuple[dg.DagsterRun, Engine, Attempt]:
        """A run that was launched for a request and has put its attempt into flight."""
        run = self.launched(tags=request.tags)
        return run, *begin(self.pipeline, run.run_id)

    def keys(self) -> list[str]:
        return sorted(self.instance.get_dynamic_partitions(f"{self.name}_epochs"))

    def materialized(self) -> dict[str, list[str]]:
        """Every materialization that Dagster has ever been told of: the partitions of each asset."""
        return {node: sorted(str(key) for key in self.partitions_of(node)) for node in ASSETS}

    def partitions_of(self, node: str) -> Iterator[str | None]:
        records = self.instance.fetch_materializations(dg.AssetKey([self.name, node]), limit=1000).records
        return (record.partition_key for record in records)


def everywhere(*epochs: int) -> dict[str, list[str]]:
    """That every asset has just these epochs."""
    return {asset: [key_of(epoch) for epoch in epochs] for asset in ASSETS}


def why(result: dg.ExecuteInProcessResult) -> str:
    """The sentence that a run has failed with."""
    assert not result.success
    return why_of(result.all_events)


def why_of(events: Sequence[dg.DagsterEvent]) -> str:
    """The sentence of the first step that failed; steps beside it may have found out that there was no use any more."""
    failures = [event.step_failure_data for event in events if event.event_type is dg.DagsterEventType.STEP_FAILURE]
    assert failures[0].user_failure_data, failures[0].error
    sentence = str(failures[0].user_failure_data.description)
    assert "\n" not in sentence
    return sentence


def create_object(pipeline: Pipeline, path: Any, data: bytes) -> None:
    """Put an object among a pipeline's, in the place of what is there."""
    store = open_store(str(pipeline.state_url)).below(pipeline.name)
    store.delete(path)
    assert store.create(path, data) is Creation.CREATED


def with_interval(**duration: float) -> CheckpointPolicy:
    return replace(EAGER, interval=pendulum.duration(**duration))
