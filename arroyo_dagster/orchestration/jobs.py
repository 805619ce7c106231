"""The jobs beside the checkpoint: each is one op with typed config, so that the launchpad explains itself."""

import time
from collections.abc import Callable, Iterator
from itertools import islice

import dagster as dg
from pydantic import Field

from arroyo_dagster.controller import Run, RunKind, Wait
from arroyo_dagster.dataflow.duration import parse_duration
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import PipelineState
from arroyo_dagster.log.entries import EpochPinned, EpochUnpinned, Fact, Resumed, StopRequested
from arroyo_dagster.model import EpochSet
from arroyo_dagster.orchestration.checks import REPLAYED, replay_result
from arroyo_dagster.orchestration.deployment import PIPELINE_TAG, Deployment, in_a_sentence, key_of, refusal
from arroyo_dagster.orchestration.epochs import refuse_differences, verified
from arroyo_dagster.orchestration.resources import SPARK
from arroyo_dagster.orchestration.runs import claim, live_runs
from arroyo_dagster.replay import Replayed, replay
from arroyo_dagster.retention import CleanupPlan, Retention
from arroyo_dagster.upkeep import Cleaned, clean, may_clean, plan, rewind

_PLANS = 5
_LOOK_AGAIN = 1.0  # seconds
_MOST_ROWS = 200


class CleanupConfig(dg.Config):
    """What a cleaning removes. Without any rule here, the pipeline's own retention holds."""

    dry_run: bool = Field(default=False, description="Show the plan, and change nothing.")
    keep_last: int | None = Field(default=None, description="Keep so many of the newest epochs.")
    keep_within: str | None = Field(default=None, description='Keep epochs taken within so long: "2 days".')
    hourly: int | None = Field(default=None, description="Keep the newest epoch of each of so many hours.")
    daily: int | None = Field(default=None, description="Keep the newest epoch of each of so many days.")

    def retention(self, default: Retention) -> Retention:
        """The rules, if there are any."""
        if (self.keep_last, self.keep_within, self.hourly, self.daily) == (None,) * 4:
            return default
        within = None if self.keep_within is None else parse_duration(self.keep_within, "keep_within")
        return Retention(self.keep_last, within, self.hourly, self.daily)


class RewindConfig(dg.Config):
    """Where to rewind to."""

    epoch: int = Field(
        description="The epoch that becomes the head again. Those after it are superseded, sinks take their output "
        "back, and the next epochs process the same rows again, with today's code. 0 begins anew.",
    )


class ReplayConfig(dg.Config):
    """Which epochs to replay."""

    epochs: str = Field(
        description='Which epochs to run again and compare: "3", "3-7", "1, 4-6". Those that are identical are '
        "recorded as verified, and their lost output is published again; nothing is published of one that differs.",
    )

    @property
    def chosen(self) -> EpochSet:
        """The epochs."""
        try:
            return EpochSet.parse(self.epochs)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


class PinConfig(dg.Config):
    """Which epoch to pin."""

    epoch: int = Field(description="The epoch that no retention rule removes from now on.")
    label: str = Field(default="", description="Why, for people.")
    unpin: bool = Field(default=False, description="Take a pin away instead.")


def publish_job(deployment: Deployment) -> dg.JobDefinition:
    """Bring the sinks up to the head. The sensor launches it when a run has died before it could."""

    def publish(context: dg.OpExecutionContext) -> None:
        claim(context)
        with in_a_sentence():
            engine = deployment.engine_of(context)
            engine.publish()
            context.log.info(f"the sinks show epoch {engine.state().head} of {deployment.name}, and all before it")

    about = "Finishes what a run that died has left half done: sinks publish the head, or take back what was rewound."
    return _job(deployment, "publish", about, _op(deployment, "publish", publish))


def stop_job(deployment: Deployment) -> dg.JobDefinition:
    """Ask for a last checkpoint."""

    def stop(context: dg.OpExecutionContext) -> None:
        _record(deployment, context, StopRequested())
        context.log.info(f"the controller takes a last epoch of {deployment.name}, then it rests until it is resumed")

    about = "Takes a last epoch at once; then the pipeline rests until it is resumed. Nothing is lost."
    return _job(deployment, "stop", about, _op(deployment, "stop", stop))


def resume_job(deployment: Deployment) -> dg.JobDefinition:
    """Let a pipeline go on."""

    def resume(context: dg.OpExecutionContext) -> None:
        _record(deployment, context, Resumed())
        context.log.info(f"{deployment.name} goes on")

    about = "Lets a stopped pipeline go on, and one that has failed too often try again."
    return _job(deployment, "resume", about, _op(deployment, "resume", resume))


def pin_job(deployment: Deployment) -> dg.JobDefinition:
    """Keep an epoch whatever the rules say."""

    @dg.op(name=f"{deployment.name}_pin_epoch")
    def pin(context: dg.OpExecutionContext, config: PinConfig) -> None:
        fact = EpochUnpinned(config.epoch) if config.unpin else EpochPinned(config.epoch, config.label)
        _record(deployment, context, fact)
        context.log.info(f"epoch {config.epoch} of {deployment.name} is {'un' if config.unpin else ''}pinned")

    return _job(deployment, "pin", "Pins an epoch, so that no retention rule removes it; or unpins it.", pin)


def rewind_job(deployment: Deployment) -> dg.JobDefinition:
    """Go back to an epoch."""

    @dg.op(name=f"{deployment.name}_rewind_to_epoch")
    def rewind_to(context: dg.OpExecutionContext, config: RewindConfig) -> None:
        claim(context)
        with in_a_sentence():
            engine = deployment.engine_of(context)
            superseded = engine.state().line.after(config.epoch)
            outcome = rewind(engine, config.epoch, context.run_id)
        if isinstance(outcome, Wait):
            raise refusal(f"pipeline {deployment.name!r} is not rewound: {outcome.reason}")
        context.log.info(f"epoch {config.epoch} of {deployment.name} is the head again; superseded are {superseded}")

    about = "Goes back to an epoch: sinks take later output back, and what came after is processed again."
    return _job(deployment, "rewind", about, rewind_to)


def replay_job(deployment: Deployment) -> dg.JobDefinition:
    """Run epochs again and compare."""

    @dg.op(name=f"{deployment.name}_replay_epochs", required_resource_keys={SPARK}, out={})
    def replay_epochs(context: dg.OpExecutionContext, config: ReplayConfig) -> Iterator[object]:
        claim(context)
        with in_a_sentence():
            engine = deployment.engine_of(context)
            replays = _replay(deployment, engine, context, config.chosen)
            for spec in deployment.persisted.values():
                result = replay_result(spec.key, engine.state())
                yield dg.AssetCheckEvaluation(spec.key, REPLAYED, result.passed, description=result.description)
            yield from verified(deployment, replays)
            refuse_differences(deployment, replays)

    about = "Runs epochs again from their parents' state, and compares. Publishes again what sinks have lost."
    return _job(deployment, "replay", about, replay_epochs)


def cleanup_job(deployment: Deployment) -> dg.JobDefinition:
    """Remove what the retention rules do not keep."""

    @dg.op(name=f"{deployment.name}_clean_up")
    def clean_up(context: dg.OpExecutionContext, config: CleanupConfig) -> None:
        claim(context)
        with in_a_sentence():
            retention = config.retention(deployment.pipeline.retention)
            done = _clean(deployment, context, retention, dry_run=config.dry_run)
        for removed in done.plan.removes if not config.dry_run else ():
            context.instance.delete_dynamic_partition(deployment.partitions.name or "", key_of(removed))
        context.add_output_metadata(
            {
                "arroyo/epochs_removed": len(done.plan.removes) if not config.dry_run else 0,
                "arroyo/epochs_kept": len(done.plan.kept),
                "arroyo/files_freed": done.files,
                "arroyo/bytes_freed": done.bytes,
                "arroyo/not_deleted": len(done.undeleted),
                "arroyo/plan": dg.MetadataValue.md(as_markdown(done.plan)),
            }
        )
        for reason in done.undeleted:
            context.log.warning(reason)

    about = "Removes epochs that no retention rule keeps, and the files that only they need. Shows its plan first."
    return _job(deployment, "cleanup", about, clean_up)


def cleanup_schedule(deployment: Deployment, job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """Clean up as often as the pipeline says. It is on from the beginning."""
    cron = deployment.pipeline.cleanup_schedule
    try:
        return dg.ScheduleDefinition(
            name=f"{deployment.name}_cleanup_schedule",
            job=job,
            cron_schedule=cron,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description=f"Removes epochs of {deployment.name} that its retention does not keep.",
            tags={PIPELINE_TAG: deployment.name},
        )
    except dg.DagsterInvalidDefinitionError:
        raise ConfigurationError(
            f"pipeline {deployment.name!r}: its cleanup_schedule must be in cron's words, such as '*/10 * * * *', "
            f"not {cron!r}"
        ) from None


def as_markdown(plan: CleanupPlan) -> str:
    """A plan for people: what goes, what stays, and why."""
    lines = [
        f"Removes epochs **{plan.removes}**: {len(plan.files):,} files, {plan.bytes:,} bytes.",
        "",
        "| kept epoch | why |",
        "|---|---|",
        *(f"| {epoch} | {'; '.join(reasons)} |" for epoch, reasons in islice(plan.kept.items(), _MOST_ROWS)),
    ]
    if len(plan.kept) > _MOST_ROWS:
        lines.append(f"| and {len(plan.kept) - _MOST_ROWS:,} later ones | |")
    return "\n".join(lines)


def _replay(deployment: Deployment, engine: Engine, context: dg.OpExecutionContext, epochs: EpochSet) -> list[Replayed]:
    kept = engine.state().kept
    if absent := epochs - kept:
        raise refusal(f"pipeline {deployment.name!r} has no epochs {absent}; those that are kept are {kept}")
    replays = []
    for epoch in epochs:
        replayed = replay(engine, epoch, context.run_id)
        if isinstance(replayed, Wait):
            raise refusal(replayed.reason)
        context.log.info(f"epoch {epoch} is {replayed.outcome}")
        replays.append(replayed)
    return replays


def _clean(deployment: Deployment, context: dg.OpExecutionContext, retention: Retention, *, dry_run: bool) -> Cleaned:
    engine = deployment.engine_of(context)
    for _ in range(_PLANS):
        if not dry_run:
            _wait_for_quiet(engine, deployment, context)
        planned = plan(engine, retention)
        context.log.info(
            f"the plan removes epochs {planned.removes}: {len(planned.files):,} files, {planned.bytes:,} bytes; "
            f"it keeps {len(planned.kept)} epochs"
        )
        if dry_run or not (planned.removes or planned.files or planned.manifests):
            return Cleaned(planned, 0, 0, ())
        done = clean(engine, planned, context.run_id)
        if isinstance(done, Cleaned):
            return done
        context.log.info(f"{done.reason}")
    raise refusal(
        f"pipeline {deployment.name!r} is not cleaned up now: its log changes too often; the next run tries again"
    )


def _wait_for_quiet(engine: Engine, deployment: Deployment, context: dg.OpExecutionContext) -> None:
    """Wait for the epoch that is being taken. While this run is there, the controller has no other one taken."""
    runs: list[Run] = []

    def look(state: PipelineState) -> list[Run]:
        seen = live_runs(context.instance, deployment, state)
        runs[:] = [run for run in seen if run.run_id != context.run_id and run.kind is not RunKind.CLEANUP]
        return runs

    deadline, said = time.monotonic() + deployment.pipeline.policy.timeout.total_seconds(), False
    while isinstance(wait := may_clean(engine, look), Wait):
        passes = engine.state().in_flight or any(run.kind is RunKind.CHECKPOINT for run in runs)
        if not passes or time.monotonic() > deadline:
            raise refusal(f"pipeline {deployment.name!r} is not cleaned up now: {wait.reason}")
        if not said:
            context.log.info(wait.reason)
        said = True
        time.sleep(_LOOK_AGAIN)


def _record(deployment: Deployment, context: dg.OpExecutionContext, fact: Fact) -> None:
    with in_a_sentence():
        outcome = deployment.engine_of(context).record(fact)
    if isinstance(outcome, Wait):
        raise refusal(f"pipeline {deployment.name!r}: {outcome.reason}")


def _op(deployment: Deployment, name: str, body: Callable[[dg.OpExecutionContext], None]) -> dg.OpDefinition:
    return dg.op(name=f"{deployment.name}_{name}_pipeline")(body)


def _job(deployment: Deployment, name: str, description: str, op: dg.OpDefinition) -> dg.JobDefinition:
    @dg.job(
        name=f"{deployment.name}_{name}",
        description=description,
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: deployment.name},
    )
    def job() -> None:
        op.alias(op.name.removeprefix(f"{deployment.name}_"))()

    return job
