"""Run an epoch again from its parent's state and its recorded plan, and compare.

Identical: that is on record, and sinks publish again what they have lost. Different, because the code or a source has
changed: nothing is published, and the replay says what differs. Replays are independent of each other, and
of checkpoints that are taken meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.controller import Wait
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log.entries import ReplayFinished, ReplayOutcome, ReplayStarted
from arroyo_dagster.model import FileEntry, Manifest
from arroyo_dagster.spark.manifests import compose
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.state.hashing import sum_digests

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay ended: what differs, if anything does, and which sinks had lost output that is there again."""

    manifest: Manifest
    differences: tuple[str, ...]
    healed: tuple[str, ...]

    @property
    def outcome(self) -> ReplayOutcome:
        """Identical or different."""
        return ReplayOutcome.DIFFERENT if self.differences else ReplayOutcome.IDENTICAL


def replay(engine: Engine, epoch: int, run_id: str | None = None) -> Replayed | Wait:
    """Replay one epoch, from beginning to end."""
    attempt = begin_replay(engine, epoch, run_id)
    if isinstance(attempt, Wait):
        return attempt
    with engine.guarded(attempt):
        reports: dict[str, StageReport] = {}
        for stage in engine.stages:
            reports[stage.name] = engine.run_stage(attempt, stage.name, reports)
        return finish_replay(engine, attempt, list(reports.values()))


def begin_replay(engine: Engine, epoch: int, run_id: str | None = None) -> Attempt | Wait:
    """Put a replay of a kept epoch into flight."""
    while True:
        state = engine.state()
        manifest = engine.manifest(epoch, state)
        number = state.replays_started + 1
        begun = engine.record(ReplayStarted(epoch, number, run_id))
        if not isinstance(begun, Wait):
            return engine.replay_of(manifest, number, begun)
        if engine.state().replays_started == state.replays_started:
            return begun


def go_on_replay(engine: Engine, attempt: Attempt, run_id: str | None = None) -> Attempt | Wait:
    """Return a replay that can still be finished, and to which what stages of `attempt` have made belongs.

    That is `attempt` while it is in flight. A run of many replays may take longer than the time-out, and a re-execution
    comes after its end; then it is a new one. Nothing is lost by that: a replay only compares.
    """
    epoch, replays = attempt.barrier.epoch, [of.started for of in engine.state().replays]
    for started in replays:
        if started.epoch == epoch and (started.attempt == attempt.number or (run_id and started.run_id == run_id)):
            return replace(attempt, number=started.attempt)
    begun = begin_replay(engine, epoch, run_id)
    return begun if isinstance(begun, Wait) else replace(attempt, number=begun.number)


def finish_replay(engine: Engine, attempt: Attempt, reports: Sequence[StageReport]) -> Replayed | Wait:
    """Compare what a replay has made with what the epoch has, heal the sinks if they are the same, and clear away."""
    state = engine.state()
    original = engine.manifest(attempt.barrier.epoch, state)
    again = compose(attempt, engine.parent(attempt), reports)
    found = tuple(differences(original, again))
    healed = () if found else tuple(_heal(engine, original, again))
    replayed = Replayed(original, found, healed)
    said = engine.record(ReplayFinished(original.epoch, attempt.number, replayed.outcome, found))
    _clear_away(engine, attempt, again, reports, healed)
    return said if isinstance(said, Wait) else replayed


def differences(original: Manifest, again: Manifest) -> Iterable[str]:
    """Name the tables and outputs of which not the same rows came out."""
    tables = [{f"table {t.operator}.{t.table}": t.files for t in of.tables} for of in (original, again)]
    outputs = [{f"output {o.sink}": o.files for o in of.staged} for of in (original, again)]
    for before, now in (tables, outputs):
        for name in sorted({*before, *now}):
            then, today = _content(before.get(name, ())), _content(now.get(name, ()))
            if then != today:
                yield f"{name}: {then[0]:,} rows then, {today[0]:,} now" + (
                    "" if then[0] != today[0] else ", and not the same"
                )


def _content(files: Sequence[FileEntry]) -> tuple[int, str]:
    return sum(file.rows for file in files), sum_digests(file.digest for file in files)


def _heal(engine: Engine, original: Manifest, again: Manifest) -> Iterable[str]:
    state, sinks = engine.state(), {node.name: node.sink for node in engine.graph.sinks}
    if original.epoch in state.needed_by_sinks:
        return  # it is about to be published for the first time
    new: Mapping[str, tuple[FileEntry, ...]] = {output.sink: output.files for output in again.staged}
    for output in original.staged:
        identity = engine.identity(output.sink, state)
        if output.sink in sinks and sinks[output.sink].missing(identity, original.epoch, output.files):
            sinks[output.sink].heal(identity, original.epoch, output.files, new[output.sink])
            yield output.sink


def _clear_away(
    engine: Engine, attempt: Attempt, again: Manifest, reports: Sequence[StageReport], healed: Sequence[str]
) -> None:
    """Delete what the replay has made, except for what was published. What cannot be deleted, nobody reads."""
    state, sinks = engine.state(), {node.name: node.sink for node in engine.graph.sinks}
    try:
        for output in again.staged:
            if output.sink in sinks and output.sink not in healed:
                sinks[output.sink].discard(engine.identity(output.sink, state), output.files)
        engine.delete_exchanges(reports)
        for path in engine.store.names(attempt.prefix):
            engine.store.delete(path)
    except StorageError as error:
        logger.warning("%s; it takes up space, and nobody reads it", error)
