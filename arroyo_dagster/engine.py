"""Take a pipeline through epochs: plan, begin, stages, manifest, complete, publish, recover. No Dagster in here.

Every step leaves the log in a state from which any process can go on. An engine holds nothing that the log and the
storage do not hold too.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias, assert_never

import pendulum
from pendulum import DateTime

from arroyo_dagster.controller import (
    AbortCheckpoint,
    AbortCleanup,
    AbortReplay,
    CheckpointPolicy,
    FinishStop,
    RecoverSinks,
    Run,
    StartCheckpoint,
    Wait,
    progress,
)
from arroyo_dagster.dataflow import Pipeline, Sink, SinkIdentity
from arroyo_dagster.dataflow.stages import cut
from arroyo_dagster.errors import (
    ArroyoDagsterError,
    ConfigurationError,
    DamagedObjectError,
    ProtocolError,
    StorageError,
)
from arroyo_dagster.log import Appended, Creation, Log, Lost, Mode, PipelineState, Refused, names
from arroyo_dagster.log.documents import pack_manifest, unpack_manifest
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    CleanupAborted,
    Compacted,
    Fact,
    PipelineCreated,
    ReplayFinished,
    ReplayOutcome,
    SinksCommitted,
    SinksFailed,
    Stopped,
)
from arroyo_dagster.log.store import local_directory
from arroyo_dagster.model import CheckpointBarrier, FileEntry, Manifest, Plan, SourceRange, TableFiles
from arroyo_dagster.spark.manifests import compose
from arroyo_dagster.spark.plans import Attempt, StageContext
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.spark.spec import StateLocation
from arroyo_dagster.state.files import read_verified

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

DEFAULT_STATE = ".arroyo"
STATE_VARIABLE = "ARROYO_STATE_URL"

Runs: TypeAlias = Sequence[Run] | Callable[[PipelineState], Sequence[Run]]
"""Runs that may still be at work, or how to look for them once the log was read: that order misses none."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An epoch was taken, and its output is out. `publish_micros` is how long that last step took."""

    manifest: Manifest
    publish_micros: int


def embedded_session() -> SparkSession:
    """Spark inside this process, with all cores."""
    from arroyo_dagster.spark.session import open_session  # noqa: PLC0415 - Spark is loaded when it is needed

    return open_session()


def locate(pipeline: Pipeline, state_url: str | None = None) -> StateLocation:
    """Tell where a pipeline's state lies: at `state_url` if that is given. Nothing is opened or made."""
    url = state_url or pipeline.state_url or os.environ.get(STATE_VARIABLE) or DEFAULT_STATE
    directory = local_directory(url)  # tasks may have another working directory
    return StateLocation(url if directory is None else str(directory), pipeline.storage_options, pipeline.name)


class Engine:
    """A pipeline, its log and a Spark to run it on.

    `session` is asked for when the first stage runs. `run_id` tells others which run of the orchestrator is at work,
    so that they can see whether it still lives. `on_step` is called after each step, with its name.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        session: Callable[[], SparkSession] = embedded_session,
        state_url: str | None = None,
        who: str = "engine",
        run_id: str | None = None,
        parallelism: int | None = None,
        clock: Callable[[], DateTime] = lambda: pendulum.now("UTC"),
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        """Check the pipeline; nothing is read or written yet."""
        self.pipeline = pipeline
        self.graph = pipeline.graph()
        self.stages = cut(self.graph)
        self._location = locate(pipeline, state_url)
        self.store = self._location.open()
        self._session = session
        self._run_id = run_id
        self._parallelism = parallelism or pipeline.parallelism or min(_cores(), pipeline.key_groups)
        self._clock = clock
        self._on_step = on_step
        self._log = Log(self.store, who, clock=clock)

    def state(self) -> PipelineState:
        """What the log says by now."""
        return self._log.read()

    def manifest(self, epoch: int, state: PipelineState | None = None) -> Manifest:
        """The record of a kept epoch."""
        state = state or self.state()
        if epoch not in state.kept:
            raise ConfigurationError(
                f"pipeline {self.pipeline.name!r} has no epoch {epoch}; those that are kept are {state.kept}"
            )
        path = state.manifest_of(epoch)
        [data] = self.store.read([path])
        if data is None:
            raise DamagedObjectError(f"{self.store.url}/{path}, the manifest of epoch {epoch}, is lost: restore it")
        return unpack_manifest(data, f"{self.store.url}/{path}")

    def run_epoch(self, runs: Runs = (), policy: CheckpointPolicy | None = None) -> Taken | Wait:
        """Finish what others have left, take one epoch, and publish it; or say why not now.

        `policy` is the pipeline's unless another is given; `runs` are those that may still be at work.
        """
        decision = self.recover(runs, policy)
        if isinstance(decision, Wait):
            return decision
        attempt = self.begin()
        if isinstance(attempt, Wait):
            return attempt
        with self.guarded(attempt):
            reports: dict[str, StageReport] = {}
            for stage in self.stages:
                reports[stage.name] = self.run_stage(attempt, stage.name, reports)
            manifest = self.complete(attempt, list(reports.values()))
        if isinstance(manifest, Wait):
            return manifest
        started = time.perf_counter_ns()
        self.publish()
        return Taken(manifest, (time.perf_counter_ns() - started) // 1000)

    def recover(self, runs: Runs = (), policy: CheckpointPolicy | None = None) -> StartCheckpoint | Wait:
        """Clear away what is dead and finish what is half done, until an epoch may begin or has to wait."""
        while isinstance(decision := self.settle(runs, policy), RecoverSinks):
            self.publish()
        return decision

    def settle(self, runs: Runs = (), policy: CheckpointPolicy | None = None) -> StartCheckpoint | RecoverSinks | Wait:
        """Write into the log what only has to be said, that the dead are dead above all; return what is to be done."""
        policy = policy or self.pipeline.policy
        while True:
            state = self.state()
            seen = runs(state) if callable(runs) else runs
            decision = progress(state, seen, policy, self._clock())
            match decision:
                case StartCheckpoint() if policy.skip_idle and self.idle(state):
                    # Looking at the sources takes time, so it is done only where it matters.
                    decision = progress(state, seen, policy, self._clock(), idle=True)
                    assert isinstance(decision, StartCheckpoint | Wait)
                    return decision
                case StartCheckpoint() | RecoverSinks() | Wait():
                    return decision
                case AbortCheckpoint(epoch, attempt, reason):
                    self._append(state, CheckpointAborted(epoch, attempt, reason))
                case AbortCleanup(cleanup, reason):
                    self._append(state, CleanupAborted(cleanup, reason))
                case AbortReplay(epoch, attempt, reason):
                    self._append(state, ReplayFinished(epoch, attempt, ReplayOutcome.FAILED, (reason,)))
                case FinishStop(epoch):
                    self._append(state, Stopped(epoch))
                case _:
                    assert_never(decision)

    def idle(self, state: PipelineState) -> bool:
        """Whether no source has anything new."""
        plan = self._plan(state, self._clock())
        return all(span.start == span.end for span in plan.sources.values())

    def created(self) -> PipelineState:
        """What the log says by now, after its first entry was written if there was none."""
        state = self.state()
        if state.created:
            return state
        life = secrets.token_hex(8)
        return self._append(state, PipelineCreated(life, self.pipeline.key_groups, self._fingerprint()))

    def begun(self, state: PipelineState) -> Attempt | None:
        """The attempt in flight, if this run has begun it."""
        if state.in_flight and self._run_id and state.in_flight.started.run_id == self._run_id:
            return self._attempt(state.in_flight.started, state)
        return None

    def begin(self) -> Attempt | Wait:
        """Plan the next epoch, and put an attempt at it into flight; or return the one that this run has begun."""
        state = self.created()
        if begun := self.begun(state):
            return begun
        if state.key_groups != self.pipeline.key_groups:
            raise ConfigurationError(
                f"pipeline {self.pipeline.name!r} was begun with {state.key_groups} key groups, which cannot change: "
                f"set key_groups={state.key_groups}, not {self.pipeline.key_groups}"
            )
        now = self._clock()
        plan = state.plan or self._plan(state, now)
        self._on_step("planned")
        barrier = CheckpointBarrier(state.next_epoch, state.min_epoch, now, state.mode is Mode.STOP_REQUESTED)
        return self._start(state, CheckpointStarted(barrier, state.attempts + 1, state.head, plan, self._run_id))

    def go_on(self, attempt: Attempt, *, again: bool) -> Attempt | Wait:
        """Return an attempt that can still be completed, and to which what stages of `attempt` have made belongs.

        That is `attempt` itself while it is in flight, and when it is complete. `again` says that the run that began it
        has ended: then, if nothing else has come of its epoch, it is a new attempt with the same parent and plan.
        """
        state, epoch = self.state(), attempt.barrier.epoch
        if begun := self.begun(state):
            return replace(attempt, barrier=begun.barrier, number=begun.number)
        if self._is_complete(attempt, state):
            return attempt
        if self._is_in_flight(attempt, state):
            if not again:
                return attempt
            self.give_up(attempt, "its run has ended, and another one goes on")
            state = self.state()
        if epoch in state.line:
            return Wait(
                f"epoch {epoch} was completed by attempt {state.attempt_of(epoch)}; there is nothing left to do"
            )
        if not again:
            return Wait(f"attempt {attempt.number} at epoch {epoch} was given up meanwhile; another one will follow")
        if (state.head, state.plan) != (attempt.parent, attempt.plan):
            return Wait(f"epoch {epoch} is no longer what attempt {attempt.number} began with; start a new run")
        barrier = replace(attempt.barrier, then_stop=state.mode is Mode.STOP_REQUESTED, min_epoch=state.min_epoch)
        retry = replace(attempt, barrier=barrier, number=state.attempts + 1)
        started = self._start(state, CheckpointStarted(barrier, retry.number, state.head, retry.plan, self._run_id))
        return started if isinstance(started, Wait) else retry

    def run_stage(self, attempt: Attempt, name: str, earlier: Mapping[str, StageReport]) -> StageReport:
        """Run one stage of an attempt on Spark. It can be run again, as long as the attempt is in flight."""
        [stage] = [stage for stage in self.stages if stage.name == name]
        report = self._execute(StageContext(self.graph, stage, attempt, self.parent(attempt), earlier, self._location))
        self._on_step(f"stage {name}")
        return report

    def complete(self, attempt: Attempt, reports: Sequence[StageReport]) -> Manifest | Wait:
        """Write the manifest and commit the epoch, if the attempt is still the one in flight."""
        epoch, number = attempt.barrier.epoch, attempt.number
        manifest = self._write_manifest(compose(attempt, self.parent(attempt), reports))
        self._on_step("manifest")
        completed = CheckpointCompleted(epoch, number, names.manifest(epoch, number))
        state = self.state()
        while True:
            match self._log.append(state, completed):
                case Appended():
                    self._on_step("completed")
                    self.delete_exchanges(reports)
                    return manifest
                case Lost(state=state):
                    continue
                case Refused(reason):
                    if self._is_complete(attempt, state):
                        return manifest
                    return Wait(f"attempt {number} at epoch {epoch} came too late: {reason}")

    def publish(self) -> None:
        """Let the sinks do what they still have to do: retract what a rewind left behind, publish the head."""
        state = self.state()
        work = state.sinks
        if work is None:
            return
        try:
            sinks = {node.name: node.sink for node in self.graph.sinks}
            for epoch in work.retract & state.kept:
                self._check_sinks(self.manifest(epoch, state), sinks)
            for name, sink in sinks.items():
                if work.retract:
                    sink.retract(self.identity(name, state), work.retract)
                    self._on_step(f"retracted {name}")
            if work.publish is not None:
                self._publish(work.publish, sinks, state)
        except Exception as error:
            self.record(SinksFailed(work.entry, _sentence(error)))
            raise
        self.record(SinksCommitted(state.head, work.entry))
        self._on_step("sinks committed")

    def verify(self) -> list[str]:
        """Check everything that is kept, and name what is lost or damaged."""
        state, problems = self.state(), list[str]()
        checked: set[str] = set()
        for epoch in state.kept:
            try:
                manifest = self.manifest(epoch, state)
            except DamagedObjectError as error:
                problems.append(str(error))
                continue
            for file in manifest.files:
                if file.path not in checked:
                    checked.add(file.path)
                    try:
                        read_verified(self.store, file)
                    except DamagedObjectError as error:
                        problems.append(str(error))
            if epoch in state.line and not (state.sinks and state.sinks.publish == epoch):
                problems += self._missing_outputs(manifest, state)
            self._on_step(f"verified epoch {epoch}")
        return problems

    @contextmanager
    def guarded(self, attempt: Attempt) -> Iterator[None]:
        """Within this context, an error aborts the attempt, so that the next one need not wait for a time-out."""
        try:
            yield
        except Exception as error:
            self.give_up(attempt, _sentence(error))
            raise

    def give_up(self, attempt: Attempt, reason: str) -> None:
        """Say that nothing will come of an attempt or a replay, if that is not known already."""
        epoch, number = attempt.barrier.epoch, attempt.number
        failed = ReplayFinished(epoch, number, ReplayOutcome.FAILED, (reason,))
        self.record(failed if attempt.replay else CheckpointAborted(epoch, number, reason))

    def _execute(self, context: StageContext) -> StageReport:
        from arroyo_dagster.spark.job import run_stage  # noqa: PLC0415 - Spark is loaded when it is needed

        return run_stage(self._session(), context)

    def _start(self, state: PipelineState, started: CheckpointStarted) -> Attempt | Wait:
        match self._log.append(state, started):
            case Appended():
                self._on_step("begun")
                return self._attempt(started, state)
            case Lost(winner):
                return Wait(f"{winner.writer} was faster: {type(winner.fact).__name__}; try again")
            case Refused(reason):
                return Wait(reason)

    @staticmethod
    def _is_in_flight(attempt: Attempt, state: PipelineState) -> bool:
        started = state.in_flight.started if state.in_flight else None
        return started is not None and (started.barrier.epoch, started.attempt) == (
            attempt.barrier.epoch,
            attempt.number,
        )

    @staticmethod
    def _is_complete(attempt: Attempt, state: PipelineState) -> bool:
        epoch = attempt.barrier.epoch
        return epoch in state.live and state.attempt_of(epoch) == attempt.number

    def replay_of(self, manifest: Manifest, number: int, state: PipelineState) -> Attempt:
        """A replay of an epoch: the same barrier, parent, plan and parallelism."""
        subtasks = max((record.parallelism for record in manifest.operators), default=self._parallelism)
        common = (manifest.parent, manifest.plan, state.life, state.key_groups, subtasks)
        return Attempt(manifest.barrier, number, *common, replay=True)

    def _attempt(self, started: CheckpointStarted, state: PipelineState) -> Attempt:
        return Attempt(
            started.barrier,
            started.attempt,
            started.parent,
            started.plan,
            state.life,
            state.key_groups,
            self._parallelism,
        )

    def _plan(self, state: PipelineState, now: DateTime) -> Plan:
        parent = self.manifest(state.head, state) if state.head else None
        before = parent.plan.sources if parent else {}
        ranges = {name: SourceRange(span.end, span.end) for name, span in before.items()}
        for node in self.graph.sources:
            start = before[node.name].end if node.name in before else None
            offsets = node.source.latest(start, now)
            ranges[node.name] = SourceRange(start, offsets.end, offsets.backlog)
        return Plan(ranges)

    def parent(self, attempt: Attempt) -> Manifest | None:
        """The parent's manifest, with the files that compactions have made for the epochs after it."""
        if not attempt.parent:
            return None
        state = self.state()
        parent = self.manifest(attempt.parent, state)
        for compaction in () if attempt.replay else state.compactions:
            where = (compaction.operator, compaction.table)
            parent = replace(
                parent,
                tables=tuple(
                    _compacted(table, compaction) if (table.operator, table.table) == where else table
                    for table in parent.tables
                ),
            )
        return parent

    def _write_manifest(self, manifest: Manifest) -> Manifest:
        """Create the manifest of an attempt; if the attempt has written one before, that one counts."""
        path = names.manifest(manifest.epoch, manifest.attempt)
        try:
            if self.store.create(path, pack_manifest(manifest)) is Creation.CREATED:
                return manifest
        except StorageError:
            [found] = self.store.read([path])
            if found is None:
                raise
        else:
            [found] = self.store.read([path])
            if found is None:
                raise StorageError(f"{self.store.url}/{path} is taken, but there is no such object")
        return unpack_manifest(found, f"{self.store.url}/{path}")

    def _publish(self, epoch: int, sinks: Mapping[str, Sink], state: PipelineState) -> None:
        manifest = self.manifest(epoch, state)
        self._check_sinks(manifest, sinks)
        staged = {output.sink: output.files for output in manifest.staged}
        for name, sink in sinks.items():
            sink.publish(self.identity(name, state), epoch, staged.get(name, ()))
            self._on_step(f"published {name}")

    def _check_sinks(self, manifest: Manifest, sinks: Mapping[str, Sink]) -> None:
        for output in manifest.staged:
            if output.files and output.sink not in sinks:
                raise ConfigurationError(
                    f"epoch {manifest.epoch} has output for the sink {output.sink!r}, which pipeline "
                    f"{self.pipeline.name!r} no longer has: put it back until that is published or retracted"
                )

    def _missing_outputs(self, manifest: Manifest, state: PipelineState) -> list[str]:
        sinks = {node.name: node.sink for node in self.graph.sinks}
        return [
            f"epoch {manifest.epoch}, sink {output.sink!r}: {missing}"
            for output in manifest.staged
            if output.sink in sinks
            for missing in sinks[output.sink].missing(self.identity(output.sink, state), manifest.epoch, output.files)
        ]

    def delete_exchanges(self, reports: Sequence[StageReport]) -> None:
        """Delete what stages have left for later ones."""
        for report in reports:
            for file in report.exchange.files if report.exchange else ():
                try:
                    self.store.delete(file.path)
                except StorageError as error:
                    logger.warning("%s; it takes up space, and nobody reads it", error)

    def identity(self, sink: str, state: PipelineState) -> SinkIdentity:
        """Which sink this is, to the sink."""
        return SinkIdentity(self.pipeline.name, sink, state.life)

    def _append(self, state: PipelineState, fact: Fact) -> PipelineState:
        """Append a fact that nobody should mind; if somebody was faster, return what is so by now."""
        match self._log.append(state, fact):
            case Appended(state=now) | Lost(state=now):
                return now
            case Refused(reason):
                raise ProtocolError(f"pipeline {self.pipeline.name!r}: {type(fact).__name__} was refused: {reason}")

    def record(self, fact: Fact) -> PipelineState | Wait:
        """Append a fact, whatever else is appended meanwhile; or say why it cannot be one by now."""
        state = self.state()
        while True:
            match self._log.append(state, fact):
                case Appended(state=now):
                    return now
                case Lost(state=state):
                    continue
                case Refused(reason):
                    return Wait(reason)

    def _fingerprint(self) -> str:
        graph = self.graph
        shape = [[node.name for node in nodes] for nodes in (graph.sources, graph.operators, graph.sinks)]
        return blake2b(repr(shape).encode(), digest_size=8).hexdigest()


def _compacted(table: TableFiles, compaction: Compacted) -> TableFiles:
    """Let the new files stand where the first of those that they replace stood."""
    replaced, files = set(compaction.replaced), list[FileEntry]()
    for file in table.files:
        if file.path not in replaced:
            files.append(file)
        elif not set(compaction.by) & set(files):
            files.extend(compaction.by)
    return replace(table, files=tuple(files))


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, ArroyoDagsterError) else f"{type(error).__name__}: {error}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
