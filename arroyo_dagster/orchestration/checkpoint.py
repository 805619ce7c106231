"""The checkpoint graph: `begin_epoch`, an op for each stage, `commit_epoch`; and the assets that come out of it.

All assets are outputs of `commit_epoch`, because Dagster records a materialization when an output is stored: an epoch
that fails must show none.
"""

from collections.abc import Iterator, Mapping

import dagster as dg

from arroyo_dagster.dataflow.stages import Stage
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.orchestration import handover
from arroyo_dagster.orchestration.checks import specs_of_checks
from arroyo_dagster.orchestration.deployment import Deployment, in_a_sentence
from arroyo_dagster.orchestration.epochs import begin, committed, compared, giving_up, go_on
from arroyo_dagster.orchestration.resources import SPARK
from arroyo_dagster.orchestration.runs import claim
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
    begun = {"attempts": dg.DependencyDefinition(BEGIN)}
    dependencies: dict[dg.NodeInvocation, Mapping[str, dg.DependencyDefinition]] = {
        dg.NodeInvocation(begin.name, BEGIN): {},
        dg.NodeInvocation(commit.name, COMMIT): {
            **begun,
            **{stage.name: dg.DependencyDefinition(stage.name) for stage in engine_stages},
        },
    }
    ops = [begin, commit]
    for stage in engine_stages:
        op = _stage_op(deployment, stage)
        ops.append(op)
        earlier = {origin: dg.DependencyDefinition(origin) for origin in _read_by(stage)}
        dependencies[dg.NodeInvocation(op.name, stage.name)] = begun | earlier
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
        backfill_policy=dg.BackfillPolicy.single_run(),
    )


def _begin_op(deployment: Deployment) -> dg.OpDefinition:
    @dg.op(
        name=f"{deployment.name}_{BEGIN}",
        out=dg.Out(io_manager_key=deployment.handover),
        description="Puts an attempt at the next epoch into flight, after it has cleared away what is dead and planned "
        "what to read; or, for partitions that exist, a replay of each.",
    )
    def begin_epoch(context: dg.OpExecutionContext) -> list[Attempt]:
        claim(context)
        with in_a_sentence():
            attempts = begin(deployment.engine_of(context), deployment, context)
        for attempt in attempts:
            context.log.info(f"{attempt} begins on top of epoch {attempt.parent}")
        return attempts

    return begin_epoch


def _stage_op(deployment: Deployment, stage: Stage) -> dg.OpDefinition:
    @dg.op(
        name=f"{deployment.name}_{stage.name}",
        ins={"attempts": dg.In(), **{origin: dg.In() for origin in _read_by(stage)}},
        out=dg.Out(io_manager_key=deployment.handover),
        required_resource_keys={SPARK},
        description=_about(stage),
    )
    def run_stage(
        context: dg.OpExecutionContext, attempts: list[Attempt], **earlier: list[StageReport]
    ) -> list[StageReport]:
        reports = []
        with in_a_sentence():
            engine = deployment.engine_of(context)
            current = go_on(engine, context, attempts)
            for number, attempt in enumerate(current):
                before = {origin: of_stage[number] for origin, of_stage in earlier.items()}
                with giving_up(engine, current):
                    reports.append(engine.run_stage(attempt, stage.name, before))
                context.log.info(_told(reports[-1]))
        return reports

    return run_stage


def _commit_op(deployment: Deployment) -> dg.OpDefinition:
    checks = _check_outputs(deployment)

    @dg.op(
        name=f"{deployment.name}_{COMMIT}",
        ins={"attempts": dg.In(), **{stage.name: dg.In() for stage in deployment.stages}},
        out={
            **{name: dg.Out(dg.Nothing) for name in deployment.persisted},
            **{name: dg.Out(dg.Nothing, is_required=False) for name in checks},
        },
        description="Writes the manifest, commits the epoch, and lets the sinks publish its output; or compares what a "
        "replay has made with what the epoch has.",
    )
    def commit_epoch(
        context: dg.OpExecutionContext, attempts: list[Attempt], **reports: list[StageReport]
    ) -> Iterator[object]:
        in_order = [
            list(of_epoch) for of_epoch in zip(*(reports[stage.name] for stage in deployment.stages), strict=True)
        ]
        with in_a_sentence():
            engine = deployment.engine_of(context)
            current = go_on(engine, context, attempts)
            if current[0].replay:
                yield from compared(engine, deployment, context, current, in_order)
            else:
                yield from committed(engine, deployment, context, current[0], in_order[0])
            for left in handover.clear(engine.store, context.run):
                context.log.warning(f"{left}; it takes up space, and nobody reads it")

    return commit_epoch


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
