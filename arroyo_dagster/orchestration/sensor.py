"""The controller: a sensor that asks `controller.progress` what is to be done, and has a run do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import dagster as dg
import pendulum

from arroyo_dagster.controller import RecoverSinks, Run, RunKind, StartCheckpoint, Wait, hold_back
from arroyo_dagster.errors import ArroyoDagsterError
from arroyo_dagster.log.state import Failures, PipelineState
from arroyo_dagster.orchestration.deployment import PIPELINE_TAG, Deployment, key_of
from arroyo_dagster.orchestration.runs import bury_the_gone, live_runs
from arroyo_dagster.orchestration.view import View, changes

WORK_TAG = "arroyo_dagster/work"
"""What a run was launched for. Dagster never launches a run key twice, so each try's names the run before it."""

_REPORTING = {RunKind.CHECKPOINT, RunKind.REPLAY}  # a run whose epoch is committed looks like a replay of it
_SHORTEST, _LONGEST = 5, 30  # seconds between two ticks


def controller_sensor(
    deployment: Deployment, checkpoint: dg.UnresolvedAssetJobDefinition, publish: dg.JobDefinition
) -> dg.SensorDefinition:
    """The sensor of a pipeline. It is on from the beginning."""
    interval = deployment.pipeline.policy.interval

    def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        try:
            return tick(deployment, context.instance, context.cursor, context.log.warning)
        except ArroyoDagsterError as error:
            raise error.with_traceback(None) from None

    return dg.SensorDefinition(
        name=f"{deployment.name}_controller",
        evaluation_fn=evaluate,
        jobs=[checkpoint, publish],
        minimum_interval_seconds=max(_SHORTEST, min(_LONGEST, round(interval.total_seconds() / 6))),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Takes an epoch of {deployment.name} every {interval.in_words()}, one at a time; retries what "
        "failed, finishes what was left half done, and keeps partitions and materializations as the log says.",
        tags={PIPELINE_TAG: deployment.name},
    )


def tick(
    deployment: Deployment, instance: dg.DagsterInstance, cursor: str | None, warn: Callable[[str], None]
) -> dg.SensorResult:
    """Look, decide, and say what Dagster has to do."""
    bury_the_gone(instance, deployment)
    engine = deployment.engine("controller")
    runs: list[Run] = []

    def look(state: PipelineState) -> list[Run]:
        runs[:] = live_runs(instance, deployment, state)
        return runs

    decision = engine.settle(look)
    state = engine.created() if isinstance(decision, StartCheckpoint) else engine.state()
    request = _request(deployment, instance, state, decision)
    busy = any(run.kind in _REPORTING for run in runs)
    news = changes(instance, deployment, engine, state, View.of(cursor), head_is_reported=busy)
    for problem in news.problems:
        warn(problem)
    added = {
        *news.add,
        *([request.partition_key] if isinstance(request, dg.RunRequest) and request.partition_key else []),
    }
    deleted = [key for key in news.delete if key not in added]  # it was the key of an epoch of an earlier life
    partitions = deployment.partitions
    return dg.SensorResult(
        run_requests=[request] if isinstance(request, dg.RunRequest) else [],
        skip_reason=request if isinstance(request, dg.SkipReason) else None,
        cursor=news.view.cursor,
        dynamic_partitions_requests=[
            *([partitions.build_add_request(sorted(added))] if added else []),
            *([partitions.build_delete_request(deleted)] if deleted else []),
        ],
        asset_events=news.events,
    )


def _request(
    deployment: Deployment,
    instance: dg.DagsterInstance,
    state: PipelineState,
    decision: StartCheckpoint | RecoverSinks | Wait,
) -> dg.RunRequest | dg.SkipReason:
    key: str | None = None
    match decision:
        case Wait(reason):
            return dg.SkipReason(reason)
        case StartCheckpoint(barrier, attempt):
            epoch = barrier.epoch
            what = f"epoch {epoch}, attempt {attempt},"
            work, job, key = f"{state.life}/epoch-{epoch}/attempt-{attempt}", "checkpoint", key_of(epoch)
        case RecoverSinks(entry, _, _):
            what = f"the sinks of epoch {state.head}"
            failed = state.sinks.failures.count if state.sinks else 0
            work, job = f"{state.life}/sinks-{entry}/failed-{failed}", "publish"
    tried = instance.get_run_records(dg.RunsFilter(tags={WORK_TAG: work}))
    if wait := hold_back(what, _failures(tried), deployment.pipeline.policy, pendulum.now("UTC")):
        return dg.SkipReason(wait.reason)
    place = f"after-{tried[0].dagster_run.run_id}" if tried else "first"
    return dg.RunRequest(
        run_key=f"{deployment.name}/{work}/{place}",
        job_name=f"{deployment.name}_{job}",
        partition_key=key,
        tags={PIPELINE_TAG: deployment.name, WORK_TAG: work},
    )


def _failures(tried: Sequence[dg.RunRecord]) -> Failures:
    """The runs, the last one first, that have ended or are past the time-out without a word of this in the log."""
    if not tried:
        return Failures()
    last = tried[0]
    at = pendulum.from_timestamp(last.end_time) if last.end_time else pendulum.instance(last.create_timestamp)
    how = "ended before it began" if last.dagster_run.is_finished else "has not begun within the time-out"
    return Failures(len(tried), f"run {last.dagster_run.run_id[:8]} {how}", at.in_timezone("UTC"))
