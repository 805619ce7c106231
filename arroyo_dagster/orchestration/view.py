"""Dagster's view of a pipeline, brought up to what the log says: partitions and materializations.

The log is the truth. An epoch that was taken outside Dagster, or whose run died before it could say what it had done,
or that an older Dagster instance knew, is reported here; the key of one that is gone is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import dagster as dg

from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import DamagedObjectError
from arroyo_dagster.log import PipelineState
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.model import EpochSet
from arroyo_dagster.orchestration.deployment import Deployment, key_of
from arroyo_dagster.orchestration.metadata import metadata_of

_AT_ONCE = 20  # epochs reported by one tick of the sensor, so that it stays a short one


@dataclass(frozen=True, slots=True)
class View:
    """Which epochs of which life of the pipeline this Dagster instance knows. The sensor's cursor holds it.

    What Dagster has of epochs up to `anew` is of an earlier life, until they are reported.
    """

    life: str = ""
    epochs: EpochSet = EpochSet()
    anew: int = 0

    @classmethod
    def of(cls, cursor: str | None) -> View:
        """What a cursor says; nothing if there is none, or it is not ours."""
        try:
            return decode(cls, json.loads(cursor or ""), "the sensor's cursor")
        except (ValueError, DamagedObjectError):
            return cls()

    @property
    def cursor(self) -> str:
        """The view as a cursor."""
        return json.dumps(encode(self))


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to be told to Dagster, and the view after that."""

    view: View
    add: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    events: tuple[dg.AssetMaterialization, ...] = ()
    problems: tuple[str, ...] = ()


def changes(
    instance: dg.DagsterInstance,
    deployment: Deployment,
    engine: Engine,
    state: PipelineState,
    view: View,
    *,
    head_is_reported: bool = False,
) -> Changes:
    """Compare the view with the log. At most so many epochs are reported at once, the oldest first.

    `head_is_reported` says that a run may be about to report the head itself. An epoch whose manifest is lost is a
    problem to be told of, and nothing that should hold up the pipeline.
    """
    gone = view.epochs - state.kept
    if view.life != state.life:
        view = View(state.life or view.life, EpochSet(), state.last_epoch if view.life else 0)
    later = EpochSet.of([state.head]) if head_is_reported and state.head else EpochSet()
    unknown = state.kept - view.epochs - state.needed_by_sinks - later
    new = EpochSet.of(islice(unknown, _AT_ONCE))
    known = _materialized(instance, deployment, new.after(view.anew))
    events, problems = list[dg.AssetMaterialization](), list[str]()
    for epoch in new:
        try:
            events += _reported(deployment, engine, state, epoch, known)
        except DamagedObjectError as error:
            problems.append(str(error))
    return Changes(
        replace(view, epochs=(view.epochs & state.kept) | new),
        tuple(map(key_of, unknown)),  # all at once: to Dagster, keys are in the order in which they were added
        tuple(map(key_of, gone)),
        tuple(events),
        tuple(problems),
    )


def _reported(
    deployment: Deployment, engine: Engine, state: PipelineState, epoch: int, known: Mapping[str, set[str]]
) -> Iterator[dg.AssetMaterialization]:
    """The materializations of an epoch that Dagster does not have."""
    untold = [node for node in deployment.nodes if key_of(epoch) not in known.get(node.name, ())]
    if not untold:
        return
    manifest = engine.manifest(epoch, state)
    for node in untold:
        yield dg.AssetMaterialization(
            deployment.specs[node.name].key,
            description="Reported from the pipeline's log.",
            metadata=metadata_of(node, manifest),
            partition=key_of(epoch),
        )


def _materialized(instance: dg.DagsterInstance, deployment: Deployment, epochs: EpochSet) -> dict[str, set[str]]:
    """Of these epochs, those that Dagster has a materialization of, for each asset."""
    keys = [key_of(epoch) for epoch in epochs]
    if not keys:
        return {}
    found: dict[str, set[str]] = {}
    for node in deployment.nodes:
        of_asset = dg.AssetRecordsFilter(deployment.specs[node.name].key, asset_partitions=keys)
        records = instance.fetch_materializations(of_asset, limit=10 * len(keys)).records
        found[node.name] = {record.partition_key for record in records if record.partition_key}
    return found
