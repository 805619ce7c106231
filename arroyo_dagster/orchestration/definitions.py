"""From pipelines to Dagster definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import dagster as dg

from arroyo_dagster.dataflow import Pipeline
from arroyo_dagster.engine import locate
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log.store import check_url
from arroyo_dagster.orchestration.checkpoint import checkpoint_assets
from arroyo_dagster.orchestration.deployment import PIPELINE_TAG, Deployment
from arroyo_dagster.orchestration.handover import HandoverIOManager
from arroyo_dagster.orchestration.jobs import (
    cleanup_job,
    cleanup_schedule,
    pin_job,
    publish_job,
    replay_job,
    resume_job,
    rewind_job,
    stop_job,
)
from arroyo_dagster.orchestration.resources import SPARK, SparkResource
from arroyo_dagster.orchestration.sensor import controller_sensor
from arroyo_dagster.orchestration.translator import Translator, specs_of


def build_definitions(
    pipelines: Sequence[Pipeline],
    *,
    state_url: str | None = None,
    spark: SparkResource | None = None,
    translator: Translator | None = None,
    executor: dg.ExecutorDefinition | None = dg.in_process_executor,
) -> dg.Definitions:
    """Everything that Dagster needs to operate pipelines: assets, jobs, a sensor and a schedule for each.

    State lies below `state_url`, unless a pipeline has its own; without either, below what the environment's
    ARROYO_STATE_URL says, or `.arroyo`. Epochs run on `spark`, by default one inside the run's process. A `translator`
    changes how nodes look as assets. Nothing is opened or started. `dg.Definitions.merge` adds definitions of your own.

    `executor` is for runs that are launched from assets, and for everything that these definitions are merged with. In
    one process, all ops of a run share its Spark, which otherwise each of them has to start. None leaves it to others.
    """
    names = Counter(pipeline.name for pipeline in pipelines)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigurationError(f"there are two pipelines named {twice[0]!r}: give one of them another name")
    parts = [_definitions(pipeline, state_url, translator or Translator()) for pipeline in pipelines]
    return dg.Definitions.merge(dg.Definitions(resources={SPARK: spark or SparkResource()}, executor=executor), *parts)


def _definitions(pipeline: Pipeline, state_url: str | None, translator: Translator) -> dg.Definitions:
    graph = pipeline.graph()
    where = pipeline.state_url or state_url
    location = locate(pipeline, where)
    check_url(location.url)
    if location.url.startswith("memory:"):
        raise ConfigurationError(f"pipeline {pipeline.name!r}: its state cannot be in memory://, which ends with a run")
    specs = specs_of(pipeline, translator)
    deployment = Deployment(pipeline, graph, where, specs)
    assets = checkpoint_assets(deployment)
    checkpoint = dg.define_asset_job(
        f"{pipeline.name}_checkpoint",
        dg.AssetSelection.assets(assets),
        description=f"Takes one epoch of {pipeline.name}. The controller launches it when one is due.",
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: pipeline.name},
    )
    publish, cleanup = publish_job(deployment), cleanup_job(deployment)
    others = [job(deployment) for job in (replay_job, rewind_job, pin_job, stop_job, resume_job)]
    return dg.Definitions(
        assets=[assets, *(specs[node.name] for node in graph.sources)],
        jobs=[checkpoint, publish, cleanup, *others],
        sensors=[controller_sensor(deployment, checkpoint, publish)],
        schedules=[cleanup_schedule(deployment, cleanup)],
        resources={deployment.handover: HandoverIOManager(deployment)},
    )
