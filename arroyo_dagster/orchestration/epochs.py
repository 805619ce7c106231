"""What the ops of a checkpoint run do: with one new epoch, or with replays of any number of existing ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dagster as dg
import pendulum

from arroyo_dagster.controller import Wait
from arroyo_dagster.engine import Engine
from arroyo_dagster.log.entries import ReplayOutcome
from arroyo_dagster.model import EpochSet, Manifest
from arroyo_dagster.orchestration.checks import Epoch, replay_result, results
from arroyo_dagster.orchestration.deployment import Deployment, epoch_of, key_of, refusal
from arroyo_dagster.orchestration.metadata import Timings, metadata_of
from arroyo_dagster.orchestration.runs import claim, others
from arroyo_dagster.replay import Replayed, begin_replay, finish_replay, go_on_replay
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport

VERIFIED = {"arroyo/replay": ReplayOutcome.IDENTICAL.value}
"""The metadata of an epoch that was replayed."""


def begin(engine: Engine, deployment: Deployment, context: dg.OpExecutionContext) -> list[Attempt]:
    """Begin what the run's partitions ask for: the next epoch, or a replay of each that exists."""
    state, epochs = engine.state(), _asked_for(deployment, context)
    if begun := engine.begun(state):
        return [begun]
    if not EpochSet.of(epochs) - state.kept:
        return _begin_replays(engine, epochs, context)
    if len(epochs) > 1:
        absent = EpochSet.of(epochs) - state.kept
        raise refusal(
            f"pipeline {deployment.name!r} cannot replay epochs {EpochSet.of(epochs)}, because {absent} do not exist; "
            f"those that can be replayed are {state.live}"
        )
    return [_begin_next(engine, deployment, context, epochs[0])]


def go_on(engine: Engine, context: dg.OpExecutionContext, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts of this run, which others may have given up; if it is a re-execution, it begins new ones then."""
    again, current = context.run.parent_run_id is not None, []
    if again:
        claim(context)
    for attempt in attempts:
        found = go_on_replay(engine, attempt, context.run_id) if attempt.replay else engine.go_on(attempt, again=again)
        if isinstance(found, Wait):
            raise refusal(found.reason)
        if found.number != attempt.number:
            context.log.info(f"{attempt} goes on as {found}")
        current.append(found)
    return current


@contextmanager
def giving_up(engine: Engine, attempts: Sequence[Attempt]) -> Iterator[None]:
    """Within this context, an error gives all of the run's attempts up, so that nobody need wait for a time-out."""
    try:
        yield
    except Exception as error:
        for attempt in attempts:
            engine.give_up(attempt, str(error) or type(error).__name__)
        raise


def committed(
    engine: Engine,
    deployment: Deployment,
    context: dg.OpExecutionContext,
    attempt: Attempt,
    reports: list[StageReport],
) -> Iterator[object]:
    """Commit an epoch and publish its output; then tell Dagster of it."""
    manifest, timings = _commit(engine, attempt, reports)
    parent, state = _parent(engine, manifest), engine.state()
    context.log.info(f"epoch {manifest.epoch} is committed, and its output is out")
    for node in deployment.nodes:
        yield dg.Output(None, node.name, metadata=metadata_of(node, manifest, timings))
    for node in deployment.nodes:
        key = deployment.specs[node.name].key
        yield from results(node, key, [Epoch(manifest, parent, engine.store)])
        yield replay_result(key, state)


def compared(
    engine: Engine,
    deployment: Deployment,
    context: dg.OpExecutionContext,
    attempts: Sequence[Attempt],
    reports: Sequence[list[StageReport]],
) -> Iterator[object]:
    """Compare replays with their epochs, and tell Dagster; fail in the end if any of them differs."""
    replays = []
    for attempt, of_epoch in zip(attempts, reports, strict=True):
        with giving_up(engine, [attempt]):
            replayed = finish_replay(engine, attempt, of_epoch)
        if isinstance(replayed, Wait):
            raise refusal(replayed.reason)
        context.log.info(f"{attempt} is {replayed.outcome}" + "".join(f"; {one}" for one in replayed.differences))
        for sink in replayed.healed:
            context.log.warning(f"epoch {replayed.manifest.epoch}: sink {sink} had lost output, which is there again")
        replays.append(replayed)
    state = engine.state()
    epochs = [Epoch(of.manifest, _parent(engine, of.manifest), engine.store) for of in replays]
    for node in deployment.nodes:
        key = deployment.specs[node.name].key
        yield from results(node, key, epochs)
        yield replay_result(key, state)
    refuse_differences(deployment, replays)
    for node in deployment.nodes:
        of_only = metadata_of(node, replays[0].manifest) if len(replays) == 1 else {}
        yield dg.Output(None, node.name, metadata=of_only | VERIFIED)
    if len(replays) > 1:
        yield from verified(deployment, replays)


def verified(deployment: Deployment, replays: Sequence[Replayed]) -> Iterator[dg.AssetMaterialization]:
    """What Dagster is told of each epoch that came out the same. An output has no metadata for single partitions."""
    for of in replays:
        for node in deployment.nodes if not of.differences else ():
            metadata = metadata_of(node, of.manifest) | VERIFIED
            key, partition = deployment.specs[node.name].key, key_of(of.manifest.epoch)
            yield dg.AssetMaterialization(key, partition=partition, metadata=metadata)


def refuse_differences(deployment: Deployment, replays: Sequence[Replayed]) -> None:
    """Fail if a replay is not identical."""
    each = [f"epoch {of.manifest.epoch} ({'; '.join(of.differences)})" for of in replays if of.differences]
    if each:
        raise refusal(
            f"pipeline {deployment.name!r} does not do today what it did then, in {', '.join(each)}; nothing was "
            "published. Rewind to the epoch before if today's result is the right one"
        )


def _parent(engine: Engine, manifest: Manifest) -> Manifest | None:
    return engine.manifest(manifest.parent) if manifest.parent else None


def _begin_replays(engine: Engine, epochs: Sequence[int], context: dg.OpExecutionContext) -> list[Attempt]:
    attempts: list[Attempt] = []
    for epoch in epochs:
        attempt = begin_replay(engine, epoch, context.run_id)
        if isinstance(attempt, Wait):
            for begun in attempts:
                engine.give_up(begun, attempt.reason)
            raise refusal(attempt.reason)
        attempts.append(attempt)
    return attempts


def _begin_next(engine: Engine, deployment: Deployment, context: dg.OpExecutionContext, epoch: int) -> Attempt:
    decision = engine.recover(others(deployment, context), deployment.pipeline.policy.at_once())
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
    return attempt


def _asked_for(deployment: Deployment, context: dg.OpExecutionContext) -> list[int]:
    keys = context.partition_keys if context.has_partition_key or context.has_partition_key_range else []
    epochs = []
    for key in keys:
        epoch = epoch_of(key)
        if epoch is None:
            raise refusal(f"the partition {key!r} is no epoch of pipeline {deployment.name!r}: epoch 1 is {key_of(1)}")
        epochs.append(epoch)
    if not epochs:
        raise refusal(
            f"an epoch of pipeline {deployment.name!r} is a partition: launch the job for the next one to take it, or "
            "for existing ones to replay them"
        )
    return epochs


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
