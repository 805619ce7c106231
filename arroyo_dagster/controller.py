"""Decide the next step of a pipeline. Pure: the log's state, the runs and the time come in, a decision goes out.

Observe the log first and the runs after it: a run writes to the log only once it exists, so every run that
the state names is then among those seen, unless somebody has deleted it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from sys import maxsize
from typing import TypeAlias

import pendulum
from pendulum import DateTime, Duration

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import Mode, PipelineState
from arroyo_dagster.log.state import Failures, SinkWork
from arroyo_dagster.model import CheckpointBarrier, EpochSet

_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When to take a checkpoint.

    The next one starts once more than `interval` has passed since the last one completed, or, with `catch_up`
    and a source that had more to give, at once; but never within `min_pause`. An attempt that takes longer than
    `timeout` is given up. After a failure the controller waits for `backoff`, doubled with each further failure in
    a row up to 64 times; after more than `tolerable_failures` in a row it waits for a person. With `skip_idle`
    no checkpoint is taken while no source has anything new.
    """

    interval: Duration = pendulum.duration(minutes=1)
    timeout: Duration = pendulum.duration(minutes=10)
    min_pause: Duration = pendulum.duration()
    tolerable_failures: int = 10
    backoff: Duration = pendulum.duration(seconds=5)
    catch_up: bool = True
    skip_idle: bool = False

    def __post_init__(self) -> None:
        for name, zero_is_fine in (("interval", False), ("timeout", False), ("min_pause", True), ("backoff", True)):
            seconds = getattr(self, name).total_seconds()
            if seconds < 0 or (seconds == 0 and not zero_is_fine):
                wanted = "zero or more" if zero_is_fine else "more than zero"
                raise ConfigurationError(f"a checkpoint policy's {name} must be {wanted}, not {seconds:g} seconds")
        if self.tolerable_failures < 0:
            raise ConfigurationError(
                f"a checkpoint policy's tolerable_failures must be zero or more, not {self.tolerable_failures}"
            )

    def at_once(self) -> CheckpointPolicy:
        """The same, but waiting for nothing that only time brings: somebody has just asked for an epoch."""
        none, at_once = pendulum.duration(), pendulum.duration(microseconds=1)
        return replace(self, interval=at_once, min_pause=none, backoff=none, tolerable_failures=maxsize)

    def pause_after(self, failures: Failures) -> Duration:
        """How long to wait after so many failures in a row."""
        return self.backoff * 2 ** min(failures.count - 1, _DOUBLINGS) if failures.count else pendulum.duration()


class RunKind(StrEnum):
    """What a run is for."""

    CHECKPOINT = "checkpoint"
    CLEANUP = "cleaning"
    REPLAY = "replay"
    REWIND = "rewind"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the orchestrator that has not ended, be it queued, starting, running or being canceled.

    Once it is older than the policy's time-out it no longer holds anything up: should it wake, the log refuses it.
    """

    run_id: str
    kind: RunKind
    since: DateTime


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Declare the attempt in flight dead."""

    epoch: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecoverSinks:
    """Let the sinks do the work of log entry `work`: publish that epoch if there is one, retract those others."""

    work: int
    publish: int | None
    retract: EpochSet


@dataclass(frozen=True, slots=True)
class FinishStop:
    """Record that the pipeline rests: its last checkpoint is done."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Start the next attempt."""

    barrier: CheckpointBarrier
    attempt: int


@dataclass(frozen=True, slots=True)
class AbortCleanup:
    """Declare the cleaning in flight dead."""

    cleanup: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartCleanup:
    """Nothing stands in the way of cleaning."""


@dataclass(frozen=True, slots=True)
class AbortReplay:
    """Declare a replay in flight dead."""

    epoch: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing, for a reason that a person understands."""

    reason: str


Decision: TypeAlias = AbortCheckpoint | RecoverSinks | FinishStop | StartCheckpoint | AbortCleanup | AbortReplay | Wait


def progress(
    state: PipelineState, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime, *, idle: bool = False
) -> Decision:
    """Decide the next step. `runs` are all that have not ended; `idle` says that no source has anything new.

    The order of the branches is the contract: finish what is in flight, clear away what is dead, rest when stopped,
    start what is due, wait.
    """
    if first := _finish(state, runs, policy, now) or _clear_away(state, runs, policy, now):
        return first
    if state.mode is Mode.STOPPED:
        return Wait(f"stopped at epoch {state.head}; resume to go on")
    obstacle = _obstacle(state, runs, policy, now, idle)
    if obstacle is None:
        barrier = CheckpointBarrier(state.next_epoch, state.min_epoch, now, state.mode is Mode.STOP_REQUESTED)
        return StartCheckpoint(barrier, state.attempts + 1)
    return Wait(obstacle)


def hold_back(what: str, failures: Failures, policy: CheckpointPolicy, now: DateTime) -> Wait | None:
    """Back off from launching runs that end before they have written anything into the log."""
    reason = _backing_off(failures, policy, now)
    return Wait(f"launching a run for {what} {reason}") if reason else None


def progress_cleanup(
    state: PipelineState, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime
) -> StartCleanup | AbortCleanup | AbortReplay | Wait:
    """Decide whether a cleaning that somebody has asked for may begin. Checkpoints and replays come first."""
    if dead := _clear_away(state, runs, policy, now):
        return dead
    if not state.kept:
        return Wait("there is no epoch yet, so there is nothing to clean")
    if state.in_flight:
        return Wait(f"epoch {state.in_flight.started.barrier.epoch} is being taken; cleaning waits for it")
    if active := _active_run(runs, {RunKind.CHECKPOINT}, policy, now):
        return Wait(f"{active}; cleaning waits for it")
    for replay in state.replays:
        return Wait(f"epoch {replay.started.epoch} is being replayed; cleaning waits for it")
    if state.cleanup:
        return Wait(_active("cleaning", state.cleanup.run_id))
    if reason := _backing_off(state.cleanup_failures, policy, now):
        return Wait(f"cleaning {reason}")
    return StartCleanup()


def _finish(state: PipelineState, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime) -> Decision | None:
    if state.in_flight:
        started, at = state.in_flight.started, state.in_flight.at
        epoch, attempt = started.barrier.epoch, started.attempt
        if end := _end(started.run_id, at, runs, policy, now):
            return AbortCheckpoint(epoch, attempt, f"{end} before the epoch was complete")
        return Wait(
            f"epoch {epoch}, attempt {attempt}, is being taken by {_run(started.run_id)} "
            f"for {_short(max(now, at) - at)}"
        )
    if state.sinks:
        return _finish_sinks(state, state.sinks, runs, policy, now)
    if state.mode is Mode.STOP_REQUESTED and state.final:
        return FinishStop(state.head)
    return None


def _finish_sinks(
    state: PipelineState, sinks: SinkWork, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime
) -> RecoverSinks | Wait:
    if not _end(sinks.run_id, sinks.since, runs, policy, now):
        return Wait(f"{_run(sinks.run_id)} is bringing the sinks up to epoch {state.head}")
    if active := _active_run(runs, {RunKind.CHECKPOINT}, policy, now):
        return Wait(f"{active}; the sinks are not up to epoch {state.head} yet")
    if reason := _given_up(sinks.failures, state.mode, policy) or _backing_off(sinks.failures, policy, now):
        return Wait(f"bringing the sinks up to epoch {state.head} {reason}")
    return RecoverSinks(sinks.entry, sinks.publish, sinks.retract)


def _clear_away(
    state: PipelineState, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime
) -> AbortCleanup | AbortReplay | None:
    if state.cleanup and (end := _end(state.cleanup.run_id, state.cleanup.at, runs, policy, now)):
        return AbortCleanup(state.cleanup.cleanup, end)
    for replay in state.replays:
        if end := _end(replay.started.run_id, replay.at, runs, policy, now):
            return AbortReplay(replay.started.epoch, replay.started.attempt, end)
    return None


def _obstacle(
    state: PipelineState, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime, idle: bool
) -> str | None:
    """Say why no checkpoint may start now, the most lasting reason first; None when one may."""
    if state.cleanup:
        return _active("cleaning", state.cleanup.run_id)
    if active := _active_run(runs, {RunKind.CHECKPOINT, RunKind.CLEANUP}, policy, now):
        return active
    if reason := _given_up(state.failures, state.mode, policy) or _backing_off(state.failures, policy, now):
        return f"epoch {state.next_epoch} {reason}"
    if state.mode is Mode.STOP_REQUESTED:
        return None
    if reason := _too_soon(state.completed_at, policy.min_pause, now):
        return f"pausing after epoch {state.head}, {reason}"
    due = state.plan is not None or (policy.catch_up and state.backlog)
    if not due and (reason := _too_soon(state.completed_at, policy.interval, now)):
        return f"the next checkpoint is due after the interval, {reason}"
    if policy.skip_idle and idle and state.plan is None:
        return f"no source has anything new since epoch {state.head}"
    return None


def _given_up(failures: Failures, mode: Mode, policy: CheckpointPolicy) -> str | None:
    """Say what a person has to do about something that has failed too often; None when it has not."""
    if failures.count <= policy.tolerable_failures:
        return None
    then = "resume the pipeline and ask for the stop again" if mode is Mode.STOP_REQUESTED else "resume the pipeline"
    return f"{_failed(failures)}; mend the cause, then {then}"


def _backing_off(failures: Failures, policy: CheckpointPolicy, now: DateTime) -> str | None:
    """Say how long something that has failed has to wait; None when it may be tried again."""
    progress = _too_soon(failures.at, policy.pause_after(failures), now)
    return f"{_failed(failures)}; waiting to try again, {progress}" if progress else None


def _failed(failures: Failures) -> str:
    times = "once" if failures.count == 1 else f"{failures.count} times in a row"
    return f"has failed {times}, the last time because {failures.reason}"


def _end(
    run_id: str | None, since: DateTime, runs: Sequence[Run], policy: CheckpointPolicy, now: DateTime
) -> str | None:
    """Say how the work of a run ended, or None while it goes on.

    Work without a run lasts until its time-out, or until the clock shows that it was wrong when the work began.
    """
    if run_id is not None and all(run.run_id != run_id for run in runs):
        return f"{_run(run_id)} ended"
    lasted = now - since if run_id else abs(now - since)
    if lasted > policy.timeout:
        return f"{_run(run_id)} took longer than the time-out of {_short(policy.timeout)}"
    return None


def _too_soon(since: DateTime | None, pause: Duration, now: DateTime) -> str | None:
    """Tell how much of the pause has passed; None once more than all of it has.

    A clock that went back far enough to lie a whole pause before `since` ends the pause too: nobody waits
    for it to catch up.
    """
    if since is None or pause.total_seconds() == 0 or abs(now - since) > pause:
        return None
    return f"{_short(abs(now - since))} of {_short(pause)}"


def _active_run(runs: Sequence[Run], kinds: Set[RunKind], policy: CheckpointPolicy, now: DateTime) -> str | None:
    for run in runs:
        if run.kind in kinds and now - run.since <= policy.timeout:
            return _active(run.kind, run.run_id)
    return None


def _active(work: str, run_id: str | None) -> str:
    return f"{work} {_run(run_id)} is active" if run_id else f"{work} by {_run(run_id)} is active"


def _run(run_id: str | None) -> str:
    if run_id is None:
        return "a process outside Dagster"
    return run_id if run_id.startswith("process-") else f"run {run_id[:8]}"


def _short(duration: Duration) -> str:
    seconds = int(duration.total_seconds())
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s".removesuffix(" 0 s")
    return f"{seconds // 3600} h {seconds % 3600 // 60} min".removesuffix(" 0 min")
