"""The commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import click

from arroyo_dagster.cli import texts
from arroyo_dagster.cli.modules import pipeline_of, pipelines_of
from arroyo_dagster.cli.output import Answer, answering
from arroyo_dagster.cli.progress import EpochsProgress, LazySession, progress_bar
from arroyo_dagster.cli.texts import EpochRow, PipelineRow, Standing
from arroyo_dagster.controller import Run, Wait
from arroyo_dagster.dataflow import Pipeline
from arroyo_dagster.engine import Engine, Taken, locate
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import PipelineState
from arroyo_dagster.log.store import local_directory
from arroyo_dagster.processes import live_runs, own_run_id
from arroyo_dagster.summary import EpochSummary, summarize

_COMMON = (
    click.option(
        "--module",
        default="definitions",
        show_default=True,
        metavar="NAME",
        help="The module with the pipelines: its name, or the path of its .py file.",
    ),
    click.option(
        "--state",
        "state_url",
        metavar="URL",
        help="Where the state lies, whatever the pipeline and ARROYO_STATE_URL say.",
    ),
)


def _common(command: Callable[..., Answer]) -> Callable[..., None]:
    """Add the options that all commands have."""
    return reduce(lambda wrapped, option: option(wrapped), reversed(_COMMON), answering(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="arroyo-dagster")
def main() -> None:
    """Take epochs of pipelines, and look at them, with no Dagster running."""


@main.command("list")
@_common
def list_pipelines(module: str, state_url: str | None) -> Answer:
    """Name the pipelines, their nodes, and how far they have come."""
    rows = []
    for pipeline in pipelines_of(module).values():
        graph = pipeline.graph()
        _, state = _observe(pipeline, state_url)
        rows.append(
            PipelineRow(
                pipeline.name,
                tuple(node.name for node in graph.sources),
                tuple(node.name for node in graph.operators),
                tuple(node.name for node in graph.sinks),
                f"{locate(pipeline, state_url).url.rstrip('/')}/{pipeline.name}",
                state.head,
                state.mode,
            )
        )
    text = texts.pipelines(rows) if rows else f"{module} has no pipeline at its top level"
    return Answer({"pipelines": rows}, (text,))


@main.command()
@click.argument("pipeline")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(min=1), help="How many to take.")
@click.option("--master", metavar="URL", help="The master of a Spark cluster; without it, Spark runs in here.")
@click.option("--remote", metavar="URL", help="The address of a Spark Connect server, such as sc://localhost:15002.")
@_common
def run(
    module: str, state_url: str | None, pipeline: str, epochs: int, master: str | None, remote: str | None
) -> Answer:
    """Take epochs of PIPELINE, one right after the other, whatever its checkpoint interval."""
    if master and remote:
        raise click.UsageError("--master and --remote exclude each other.")
    declared = pipeline_of(module, pipeline)
    run_id, taken = own_run_id(), list[EpochSummary]()
    error: Exception | str | None = None
    with progress_bar() as bar:
        progress = EpochsProgress(bar, epochs)
        session = LazySession(master, remote, progress)
        engine = Engine(
            declared, session=session, state_url=state_url, who=run_id, run_id=run_id, on_step=progress.step
        )
        progress.follow(engine)
        try:
            while len(taken) < epochs and error is None:
                match engine.run_epoch(_others(run_id), declared.policy.at_once()):
                    case Taken(manifest, publish_micros):
                        taken.append(summarize(manifest, publish_micros))
                        progress.epoch_taken()
                    case Wait(reason):
                        error = f"pipeline {pipeline!r}: {reason}"
        except Exception as raised:
            if session.interrupted:
                raise KeyboardInterrupt from raised
            if not taken:
                raise
            error = raised  # the epochs before it are there
        finally:
            session.close()
    text = (texts.taken(taken), texts.ABOUT_TIMES, f"State: {engine.store.url}") if taken else ()
    return Answer({"pipeline": pipeline, "state": engine.store.url, "epochs": taken}, text, error)


@main.command()
@click.argument("pipeline")
@_common
def epochs(module: str, state_url: str | None, pipeline: str) -> Answer:
    """Name the epochs of PIPELINE that are kept."""
    engine, state = _observe(pipeline_of(module, pipeline), state_url)
    rows = []
    for epoch in state.kept if engine else ():
        assert engine is not None
        manifest = engine.manifest(epoch, state)
        rows.append(EpochRow(manifest.barrier.timestamp, Standing.of(state, epoch), summarize(manifest)))
    return Answer(
        {"pipeline": pipeline, "epochs": [row.document() for row in rows]},
        (texts.epochs(rows) if rows else _no_epochs(pipeline),),
    )


@main.command()
@click.argument("pipeline")
@click.argument("epoch", type=click.IntRange(min=1))
@_common
def show(module: str, state_url: str | None, pipeline: str, epoch: int) -> Answer:
    """Tell everything about one EPOCH of PIPELINE."""
    engine, state = _observe(pipeline_of(module, pipeline), state_url)
    if engine is None or not state.kept:
        raise ConfigurationError(_no_epochs(pipeline))
    manifest, standing = engine.manifest(epoch, state), Standing.of(state, epoch)
    document = {
        "pipeline": pipeline,
        "standing": standing,
        "summary": summarize(manifest),
        "manifest": manifest,
    }
    return Answer(document, tuple(texts.epoch(pipeline, manifest, standing)))


@main.command()
@click.argument("pipeline")
@_common
def verify(module: str, state_url: str | None, pipeline: str) -> Answer:
    """Check everything of PIPELINE that is kept: manifests, state, published output."""
    declared = pipeline_of(module, pipeline)
    with progress_bar() as bar:
        task = bar.add_task("reading the log", total=None)
        engine, state = _observe(declared, state_url, lambda step: bar.advance(task))
        if engine is None or not state.kept:
            return Answer({"pipeline": pipeline, "epochs": 0, "problems": []}, (_no_epochs(pipeline),))
        bar.update(task, total=len(state.kept), description=f"checking epochs {state.kept}")
        problems = engine.verify()
    document = {"pipeline": pipeline, "epochs": len(state.kept), "problems": problems}
    if problems:
        found = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return Answer(document, tuple(problems), f"pipeline {pipeline!r} has {found}")
    return Answer(document, (f"epochs {state.kept} of pipeline {pipeline!r} are whole",))


def _observe(
    pipeline: Pipeline, state_url: str | None, on_step: Callable[[str], None] = lambda step: None
) -> tuple[Engine | None, PipelineState]:
    """Look at a pipeline's log. Opening storage would make its directory: where there is none, there is no log."""
    directory = local_directory(locate(pipeline, state_url).url)
    if directory is not None and not directory.exists():
        return None, PipelineState()
    engine = Engine(pipeline, state_url=state_url, on_step=on_step)
    return engine, engine.state()


def _others(run_id: str) -> Callable[[PipelineState], Sequence[Run]]:
    """How to look for runs that are at work. This process is not: it is about to begin."""
    return lambda state: [run for run in live_runs(state) if run.run_id != run_id]


def _no_epochs(pipeline: str) -> str:
    return f"pipeline {pipeline!r} has no epochs yet"
