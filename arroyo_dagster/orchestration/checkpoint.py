"""The checkpoint graph: `begin_epoch`, an op for each stage, `commit_epoch`; and the assets that come out of it.

All assets are outputs of `commit_epoch`, because Dagster records a materialization when an output is stored: an epoch
that fails must show none.
"""

import time
from collections.abc import Iterator, Mapping

import dagster as dg
import pendulum

from arroyo_dagster.controller import Wait
from arroyo_dagster.dataflow.stages import Stage
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.model import Manifest
from arroyo_dagster.orchestration import handover
from arroyo_dagster.orchestration.checks import Epoch, results, specs_of_checks
from arroyo_dagster.orchestration.deployment import SPARK, Deployment, epoch_of, in_a_sentence, key_of, refusal
from arroyo_dagster.orchestration.metadata import Timings, metadata_of
from arroyo_dagster.orchestration.runs import claim, live_runs
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport

BEGIN, COMMIT = "begin_epoch", "commit_epoch"


def checkpoint_assets(deployment: Deployment) -> dg.AssetsDefinition:
    """The assets of a pipeline, and the graph that takes an epoch of them."""
    engine_stages = deployment.stages
    for stage in engine_stages:
        if stage.name in {BEGIN, COMMIT}:
            raise ConfigurationError(
                f"pipeline {deployment.name!r}: {stage.name!r} is what every checkpoint run calls one of its own ops; "
                "give the operator or sink another name"
            )
    begin, commit = _begin_op(deployment), _commit_op(deployment)
    attempt = {"attempt": dg.DependencyDefinition(BEGIN)}
    dependencies: dict[dg.NodeInvocation, Mapping[str, dg.DependencyDefinition]] = {
        dg.NodeInvocation(begin.name, BEGIN): {},
        dg.NodeInvocation(commit.name, COMMIT): {
            **attempt,
            **{stage.name: dg.DependencyDefinition(stage.name) for stage in engine_stages},
        },
    }
    ops = [begin, commit]
    for stage in engine_stages:
        op = _stage_op(deployment, stage)
        ops.append(op)
        earlier = {origin: dg.DependencyDefinition(origin) for origin in _read_by(stage)}
        dependencies[dg.NodeInvocation(op.name, stage.name)] = attempt | earlier
    outputs = [dg.OutputMapping(name, COMMIT, name) for name in commit.outs]
    return dg.AssetsDefinition(
        node_def=dg.GraphDefinition(
            name=f"{deployment.name}_epoch",
            description=f"Takes one epoch of the pipeline {deployment.name}.",
            node_defs=ops,
            dependencies=dependencies,
            output_mappings=outputs,
        ),
        keys_by_output_name={name: spec.key for name, spec in deployment.persisted.items()},
        specs=list(deployment.persisted.values()),
        check_specs_by_output_name=_check_outputs(deployment),
    )


def _begin_op(deployment: Deployment) -> dg.OpDefinition:
    @dg.op(
        name=f"{deployment.name}_{BEGIN}",
        out=dg.Out(io_manager_key=deployment.handover),
        description="Clears away what is dead, plans what the epoch reads, and puts the attempt into flight.",
    )
    def begin_epoch(context: dg.OpExecutionContext) -> Attempt:
        claim(context.instance, context.run)
        with in_a_sentence():
            return _begin(_engine(deployment, context), deployment, context)

    return begin_epoch


def _stage_op(deployment: Deployment, stage: Stage) -> dg.OpDefinition:
    @dg.op(
        name=f"{deployment.name}_{stage.name}",
        ins={"attempt": dg.In(), **{origin: dg.In() for origin in _read_by(stage)}},
        out=dg.Out(io_manager_key=deployment.handover),
        required_resource_keys={SPARK},
        description=_about(stage),
    )
    def run_stage(context: dg.OpExecutionContext, attempt: Attempt, **earlier: StageReport) -> StageReport:
        with in_a_sentence():
            engine = _engine(deployment, context)
            current = _go_on(engine, context, attempt)
            with engine.guarded(current):
                report = engine.run_stage(current, stage.name, earlier)
        context.log.info(_told(report))
        return report

    return run_stage


def _commit_op(deployment: Deployment) -> dg.OpDefinition:
    outs = {name: dg.Out(dg.Nothing) for name in (*deployment.persisted, *_check_outputs(deployment))}

    @dg.op(
        name=f"{deployment.name}_{COMMIT}",
        ins={"attempt": dg.In(), **{stage.name: dg.In() for stage in deployment.stages}},
        out=outs,
        description="Writes the manifest, commits the epoch, and lets the sinks publish its output.",
    )
    def commit_epoch(context: dg.OpExecutionContext, attempt: Attempt, **reports: StageReport) -> Iterator[object]:
        with in_a_sentence():
            engine = _engine(deployment, context)
            current = _go_on(engine, context, attempt)
            manifest, timings = _commit(engine, current, [reports[stage.name] for stage in deployment.stages])
            parent = engine.manifest(manifest.parent) if manifest.parent else None
        context.log.info(f"epoch {manifest.epoch} is committed, and its output is out")
        for node in deployment.nodes:
            yield dg.Output(None, node.name, metadata=metadata_of(node, manifest, timings))
        for node in deployment.nodes:
            yield from results(node, deployment.specs[node.name].key, Epoch(manifest, parent, engine.store))
        for left in handover.clear(engine.store, context.run):
            context.log.warning(f"{left}; it is left for the cleaning job")

    return commit_epoch


def _begin(engine: Engine, deployment: Deployment, context: dg.OpExecutionContext) -> Attempt:
    epoch = _asked_for(deployment, context)
    if begun := engine.begun(engine.state()):
        return begun
    if epoch in (state := engine.state()).kept:
        raise refusal(
            f"epoch {epoch} of pipeline {deployment.name!r} exists already; the next one is {state.next_epoch}"
        )
    decision = engine.recover(
        lambda seen: [r for r in live_runs(context.instance, deployment, seen) if r.run_id != context.run_id],
        deployment.pipeline.policy.at_once(),
    )
    if isinstance(decision, Wait):
        raise refusal(f"epoch {epoch} of pipeline {deployment.name!r} cannot be taken now: {decision.reason}")
    if epoch != decision.barrier.epoch:
        raise refusal(
            f"pipeline {deployment.name!r} has no epoch {epoch}; the next one is {decision.barrier.epoch}, and those "
            f"that are kept are {engine.state().kept}"
        )
    attempt = engine.begin()
    if isinstance(attempt, Wait):
        raise refusal(f"epoch {epoch} of pipeline {deployment.name!r} cannot be taken now: {attempt.reason}")
    context.log.info(f"epoch {epoch}, attempt {attempt.number}, begins on top of epoch {attempt.parent}")
    return attempt


def _asked_for(deployment: Deployment, context: dg.OpExecutionContext) -> int:
    keys = context.partition_keys if context.has_partition_key or context.has_partition_key_range else []
    if len(keys) != 1:
        raise refusal(
            f"an epoch of pipeline {deployment.name!r} is a partition: launch the job for one of them; the next one "
            "makes a new epoch"
        )
    epoch = epoch_of(keys[0])
    if epoch is None:
        raise refusal(f"the partition {keys[0]!r} is no epoch of pipeline {deployment.name!r}: epoch 1 is {key_of(1)}")
    return epoch


def _go_on(engine: Engine, context: dg.OpExecutionContext, attempt: Attempt) -> Attempt:
    """The attempt of this run; if the run is a re-execution, it may have to put a new one into flight."""
    current = engine.go_on(attempt, again=context.run.parent_run_id is not None)
    if isinstance(current, Wait):
        raise refusal(current.reason)
    if current.number != attempt.number:
        claim(context.instance, context.run)
        context.log.info(f"epoch {current.barrier.epoch} goes on as attempt {current.number}")
    return current


def _commit(engine: Engine, attempt: Attempt, reports: list[StageReport]) -> tuple[Manifest, Timings]:
    started = time.perf_counter()
    with engine.guarded(attempt):
        manifest = engine.complete(attempt, reports)
    if isinstance(manifest, Wait):
        raise refusal(manifest.reason)
    completed = time.perf_counter()
    engine.publish()
    published = time.perf_counter()
    epoch = (pendulum.now("UTC") - manifest.barrier.timestamp).total_seconds()
    return manifest, Timings(*(round(1000 * s) for s in (epoch, completed - started, published - completed)))


def _engine(deployment: Deployment, context: dg.OpExecutionContext) -> Engine:
    def session():  # type: ignore[no-untyped-def]
        return getattr(context.resources, SPARK).session()

    return deployment.engine(f"run {context.run_id}", context.run_id, session)


def _check_outputs(deployment: Deployment) -> dict[str, dg.AssetCheckSpec]:
    return {
        f"check__{node.name}__{spec.name}": spec
        for node in deployment.nodes
        for spec in specs_of_checks(node, deployment.specs[node.name].key)
    }


def _read_by(stage: Stage) -> list[str]:
    """The earlier stages that a stage reads from."""
    return list(dict.fromkeys(leg.origin for leg in stage.legs if not leg.from_source))


def _about(stage: Stage) -> str:
    origins = ", ".join(dict.fromkeys(leg.origin for leg in stage.legs))
    sinks = ", ".join(outlet.sink for outlet in stage.outlets)
    return f"One Spark job: reads {origins}" + (f"; writes for {sinks}" if sinks else "") + "."


def _told(report: StageReport) -> str:
    parts = [f"{source.rows:,} rows of {source.source}" for source in report.sources]
    if record := report.operator:
        parts.append(f"{record.rows_in:,} rows in, {record.rows_out:,} out, {record.late_rows:,} late")
    return f"{report.stage}: " + "; ".join(parts) if parts else f"{report.stage} is done"
