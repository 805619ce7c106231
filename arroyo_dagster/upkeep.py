"""What people do to a pipeline beside taking epochs: clean it up, and take it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import pendulum

from arroyo_dagster.controller import AbortCleanup, AbortReplay, Run, StartCleanup, Wait, progress_cleanup
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import PipelineState, names
from arroyo_dagster.log.documents import unpack_manifest
from arroyo_dagster.log.entries import (
    CleanupAborted,
    CleanupCompleted,
    ReplayFinished,
    ReplayOutcome,
    Rewound,
)
from arroyo_dagster.model import Manifest, ObjectPath
from arroyo_dagster.retention import CleanupPlan, Retention, plan_cleanup


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a cleaning did: what it had planned, how much of it is gone, and why the rest is not."""

    plan: CleanupPlan
    files: int
    bytes: int
    undeleted: tuple[str, ...]


def plan(engine: Engine, retention: Retention) -> CleanupPlan:
    """Work out what a cleaning would do now. Nothing is changed."""
    state = engine.state()
    return plan_cleanup(state, _manifests(engine), retention, pendulum.now("UTC"))


def may_clean(engine: Engine, runs: Callable[[PipelineState], Sequence[Run]]) -> StartCleanup | Wait:
    """Clear away what is dead, and tell whether a cleaning may begin."""
    while True:
        state = engine.state()
        decision = progress_cleanup(state, runs(state), engine.pipeline.policy, pendulum.now("UTC"))
        match decision:
            case StartCleanup() | Wait():
                return decision
            case AbortCleanup(cleanup, reason):
                engine.record(CleanupAborted(cleanup, reason))
            case AbortReplay(epoch, attempt, reason):
                engine.record(ReplayFinished(epoch, attempt, ReplayOutcome.FAILED, (reason,)))
            case _:
                assert_never(decision)


def clean(engine: Engine, plan: CleanupPlan, run_id: str | None = None) -> Cleaned | Wait:
    """Carry a plan out: from the log's entry on, its epochs are gone; then files go, then manifests, oldest first.

    It may die anywhere: what it leaves, the next cleaning finds. A file that cannot be deleted is reported, and does
    not keep the others.
    """
    begun = engine.record(plan.started(run_id))
    if isinstance(begun, Wait):
        return begun
    assert begun.cleanup is not None
    cleanup, undeleted = begun.cleanup.cleanup, dict[ObjectPath, str]()
    try:
        freed = [file for file in plan.files if _deleted(engine, file.path, undeleted)]
        if not undeleted:  # the manifests are all that leads to a file that is left
            for manifest in plan.manifests:
                _deleted(engine, manifest, undeleted)
    except BaseException as error:
        engine.record(CleanupAborted(cleanup, f"{type(error).__name__}: {error}"))
        raise
    done = Cleaned(plan, len(freed), sum(file.bytes for file in freed), tuple(undeleted.values()))
    engine.record(CleanupCompleted(cleanup, done.files, done.bytes, tuple(undeleted)))
    return done


def rewind(engine: Engine, epoch: int, run_id: str | None = None) -> PipelineState | Wait:
    """Make an epoch the head again, and have the sinks take back the output of those after it."""
    state = engine.state()
    rewound = engine.record(Rewound(epoch, state.line.after(epoch), run_id))
    if isinstance(rewound, Wait):
        return rewound
    engine.publish()
    return engine.state()


def _manifests(engine: Engine) -> list[Manifest]:
    paths = [path for path in engine.store.names(names.EPOCHS) if names.is_manifest(path)]
    found = zip(paths, engine.store.read(paths), strict=True)
    return [unpack_manifest(data, f"{engine.store.url}/{path}") for path, data in found if data is not None]


def _deleted(engine: Engine, path: ObjectPath, undeleted: dict[ObjectPath, str]) -> bool:
    try:
        engine.store.delete(path)
    except StorageError as error:
        undeleted[path] = str(error)
    return path not in undeleted
