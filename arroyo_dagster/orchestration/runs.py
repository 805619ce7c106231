"""Which runs may still be at work on a pipeline, whoever launched them, and from which page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dagster as dg
import pendulum
from pendulum import DateTime

from arroyo_dagster.controller import Run, RunKind
from arroyo_dagster.log import PipelineState
from arroyo_dagster.orchestration.deployment import Deployment, epoch_of
from arroyo_dagster.processes import is_process, lives, named_runs, own_run_id

PROCESS_TAG = "arroyo_dagster/process"
"""Which process a run is, for as long as Dagster has not noticed that it is gone. Re-executions inherit tags."""

_PARTITION_TAGS = ("dagster/partition", "dagster/asset_partition_range_start")
_ENDED = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
_UNFINISHED = [status for status in dg.DagsterRunStatus if status not in _ENDED]
_FROM_ASSET_PAGES = "__ASSET_JOB"

KINDS = {
    "checkpoint": RunKind.CHECKPOINT,
    "publish": RunKind.CHECKPOINT,
    "cleanup": RunKind.CLEANUP,
    "replay": RunKind.REPLAY,
    "rewind": RunKind.REWIND,
}
"""What the jobs of a pipeline do, by the end of their names."""


def live_runs(instance: dg.DagsterInstance, deployment: Deployment, state: PipelineState) -> list[Run]:
    """The runs that have not ended: those of our jobs, and those that the state names, whoever launched them."""
    named = [run for run in named_runs(state) if _lives(instance, run.run_id)]
    ours = [
        Run(record.dagster_run.run_id, kind, _since(record))
        for record, kind in _unfinished(instance, deployment, state)
        if not is_gone(record.dagster_run)
    ]
    return [*named, *ours]


def others(deployment: Deployment, context: dg.OpExecutionContext) -> Callable[[PipelineState], list[Run]]:
    """How a run looks for those that the log says are at work. It is here itself: who has not begun may come later."""

    def look(state: PipelineState) -> list[Run]:
        named = {run.run_id for run in named_runs(state)} - {context.run_id}
        return [run for run in live_runs(context.instance, deployment, state) if run.run_id in named]

    return look


def bury_the_gone(instance: dg.DagsterInstance, deployment: Deployment) -> None:
    """Tell Dagster of runs whose process is gone: it would take them to be running for ever."""
    for record, _ in _unfinished(instance, deployment, PipelineState()):
        if is_gone(record.dagster_run):
            run = instance.get_run_by_id(record.dagster_run.run_id)
            if run and not run.is_finished:  # it may have ended well after we looked at it
                instance.report_run_failed(run, "The run's process is gone: it was killed, or its host died.")


def claim(context: dg.OpExecutionContext) -> None:
    """Note which process a run is, so that others see when it is gone.

    Only the executor that is in the run's process tells; of the others, each step may be in one of its own.
    """
    if context.job_def.executor_def.name == dg.in_process_executor.name:
        context.instance.add_run_tags(context.run_id, {PROCESS_TAG: f"{context.run_id}/{own_run_id()}"})


def is_gone(run: dg.DagsterRun) -> bool:
    """Tell whether the process of a run is gone, though Dagster still takes it to be running."""
    owner, _, process = run.tags.get(PROCESS_TAG, "").partition("/")
    return owner == run.run_id and not lives(process)


def _lives(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Tell whether a run may still be at work, whatever its job is called."""
    if is_process(run_id):
        return lives(run_id)
    run = instance.get_run_by_id(run_id)
    return run is not None and not run.is_finished and not is_gone(run)


def _unfinished(
    instance: dg.DagsterInstance, deployment: Deployment, state: PipelineState
) -> Iterator[tuple[dg.RunRecord, RunKind]]:
    for record in instance.get_run_records(dg.RunsFilter(statuses=_UNFINISHED)):
        kind = _kind(record.dagster_run, deployment, state)
        if kind is not None:
            yield record, kind


def _kind(run: dg.DagsterRun, deployment: Deployment, state: PipelineState) -> RunKind | None:
    of, _, job = run.job_name.rpartition("_")
    kind = KINDS.get(job) if of == deployment.name else None
    if run.job_name.startswith(_FROM_ASSET_PAGES):
        ours = {spec.key for spec in deployment.persisted.values()}
        kind = RunKind.CHECKPOINT if ours & set(run.asset_selection or ()) else None
    if kind is RunKind.CHECKPOINT and not run.job_name.endswith("_publish"):
        epochs = (epoch_of(run.tags[tag]) for tag in _PARTITION_TAGS if tag in run.tags)
        if any(epoch is not None and epoch in state.kept for epoch in epochs):
            return RunKind.REPLAY
    return kind


def _since(record: dg.RunRecord) -> DateTime:
    """When a run began. One that is queued behind others has all the time in the world."""
    if record.dagster_run.status is dg.DagsterRunStatus.QUEUED:
        return pendulum.now("UTC")
    if record.start_time is not None:
        return pendulum.from_timestamp(record.start_time, "UTC")
    return pendulum.instance(record.create_timestamp).in_timezone("UTC")
