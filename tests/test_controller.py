"""The controller's decision table: every branch, every boundary."""

from collections.abc import Sequence
from dataclasses import replace

import pendulum
import pytest
from pendulum import DateTime

from arroyo_dagster import CheckpointPolicy
from arroyo_dagster.controller import (
    AbortCheckpoint,
    AbortCleanup,
    AbortReplay,
    Decision,
    FinishStop,
    RecoverSinks,
    Run,
    RunKind,
    StartCheckpoint,
    StartCleanup,
    Wait,
    progress,
    progress_cleanup,
)
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import PipelineState
from arroyo_dagster.log.entries import CleanupAborted, CleanupCompleted, Resumed, SinksFailed, Stopped, StopRequested
from arroyo_dagster.model import CheckpointBarrier, EpochSet, Plan, SourceRange
from tests.facts import NOON, aborted, after, cleanup, committed, completed, replay, rewound, started, with_epochs

RUN = "3f2a9c1d-7b5e"
POLICY = CheckpointPolicy(
    interval=pendulum.duration(seconds=30),
    timeout=pendulum.duration(minutes=10),
    tolerable_failures=3,
    backoff=pendulum.duration(seconds=4),
)
CAREFUL = replace(POLICY, min_pause=pendulum.duration(seconds=5))
SKIPPING = replace(POLICY, skip_idle=True)


def checkpoint_run(since: DateTime = NOON) -> Run:
    return Run(RUN, RunKind.CHECKPOINT, since)


def start(epoch: int, at: DateTime, attempt: int = 1, *, min_epoch: int = 0, then_stop: bool = False) -> Decision:
    return StartCheckpoint(CheckpointBarrier(epoch, min_epoch, at, then_stop), attempt)


def seconds(count: float) -> DateTime:
    return NOON.add(seconds=int(count), microseconds=round(count % 1 * 1_000_000))


def failed(times: int) -> PipelineState:
    """Five epochs; the sixth has failed so many times in a row, each time at noon."""
    state = FIVE
    for _ in range(times):
        state = after(state, started(state))
        state = after(state, aborted(state, "the disk was full"))
    return state


def sinks_failed(times: int) -> PipelineState:
    """Six epochs; the sinks have failed so many times to publish the sixth, each time at noon."""
    state = COMPLETED
    for _ in range(times):
        state = after(state, SinksFailed(COMPLETED.sequence, "no table"))
    return state


NEW = with_epochs(0)
FIVE = with_epochs(5)
IN_FLIGHT = after(FIVE, started(FIVE, run_id=RUN))
BY_HAND = after(FIVE, started(FIVE))
COMPLETED = after(IN_FLIGHT, completed(IN_FLIGHT))
BEHIND = after(FIVE, started(FIVE, plan=Plan({"bids": SourceRange(0, 1, backlog=True)}), run_id=RUN))
BEHIND = after(BEHIND, completed(BEHIND))
BEHIND = after(BEHIND, committed(BEHIND))
CLEANING = after(FIVE, cleanup(FIVE, 1, 2, run_id=RUN))
CLEANED = after(CLEANING, CleanupCompleted(CLEANING.sequence, 2, 20))
REPLAYING = after(FIVE, replay(FIVE, 4, RUN))
STOPPING = after(FIVE, StopRequested())
LAST_DONE = with_epochs(1, STOPPING)
STOPPED = after(LAST_DONE, Stopped(6))
REWOUND = after(FIVE, rewound(FIVE, 3, RUN))
CLEANING_RUN = Run(RUN, RunKind.CLEANUP, NOON)
OTHER_RUN = "77aa01c2-9d3f"

CASES: dict[str, tuple[PipelineState, Sequence[Run], CheckpointPolicy, DateTime, Decision]] = {
    # Nothing in flight
    "never checkpointed": (NEW, [], POLICY, NOON, start(1, NOON)),
    "never even created": (PipelineState(), [], POLICY, NOON, start(1, NOON)),
    "within the interval": (FIVE, [], POLICY, seconds(18), Wait("the next checkpoint is due after the interval, 18 s of 30 s")),
    "exactly at the interval": (FIVE, [], POLICY, seconds(30), Wait("the next checkpoint is due after the interval, 30 s of 30 s")),
    "just past the interval": (FIVE, [], POLICY, seconds(30.000001), start(6, seconds(30.000001))),
    "min_epoch goes along": (CLEANED, [], POLICY, seconds(31), start(6, seconds(31), min_epoch=2)),
    "a replay does not hold checkpoints up": (REPLAYING, [Run(RUN, RunKind.REPLAY, NOON)], POLICY, seconds(31), start(6, seconds(31))),
    # In flight
    "in flight and alive": (IN_FLIGHT, [checkpoint_run()], POLICY, seconds(42), Wait("epoch 6, attempt 1, is being taken by run 3f2a9c1d for 42 s")),
    "in flight and dead": (IN_FLIGHT, [], POLICY, seconds(1), AbortCheckpoint(6, 1, "run 3f2a9c1d ended before the epoch was complete")),
    "in flight, dead, and another run is alive": (
        IN_FLIGHT, [Run(OTHER_RUN, RunKind.CHECKPOINT, NOON)], POLICY, seconds(1), AbortCheckpoint(6, 1, "run 3f2a9c1d ended before the epoch was complete"),
    ),
    "in flight exactly at the time-out": (IN_FLIGHT, [checkpoint_run()], POLICY, seconds(600), Wait("epoch 6, attempt 1, is being taken by run 3f2a9c1d for 10 min")),
    "in flight past the time-out": (
        IN_FLIGHT, [checkpoint_run()], POLICY, seconds(601), AbortCheckpoint(6, 1, "run 3f2a9c1d took longer than the time-out of 10 min before the epoch was complete"),
    ),
    "in flight without a run": (BY_HAND, [], POLICY, seconds(65), Wait("epoch 6, attempt 1, is being taken by a process outside Dagster for 1 min 5 s")),
    "in flight without a run, past the time-out": (
        BY_HAND, [], POLICY, seconds(601), AbortCheckpoint(6, 1, "a process outside Dagster took longer than the time-out of 10 min before the epoch was complete"),
    ),
    "in flight, stop requested": (after(IN_FLIGHT, StopRequested()), [checkpoint_run()], POLICY, seconds(1), Wait("epoch 6, attempt 1, is being taken by run 3f2a9c1d for 1 s")),
    # Sinks
    "completed, sinks not committed, run alive": (COMPLETED, [checkpoint_run()], POLICY, seconds(1), Wait("run 3f2a9c1d is bringing the sinks up to epoch 6")),
    "completed, sinks not committed, run dead": (COMPLETED, [], POLICY, seconds(1), RecoverSinks(18, 6, EpochSet())),
    "completed, sinks not committed, past the time-out": (COMPLETED, [checkpoint_run()], POLICY, seconds(601), RecoverSinks(18, 6, EpochSet())),
    "completed, sinks not committed, another run alive": (
        COMPLETED, [Run(OTHER_RUN, RunKind.CHECKPOINT, NOON)], POLICY, seconds(1), Wait("checkpoint run 77aa01c2 is active; the sinks are not up to epoch 6 yet"),
    ),
    "completed, sinks not committed, another run hangs": (COMPLETED, [Run(OTHER_RUN, RunKind.CHECKPOINT, NOON)], POLICY, seconds(601), RecoverSinks(18, 6, EpochSet())),
    "sinks failed twice, too soon": (
        sinks_failed(2), [], POLICY, seconds(8), Wait("bringing the sinks up to epoch 6 has failed 2 times in a row, the last time because no table; waiting to try again, 8 s of 8 s"),
    ),
    "sinks failed twice, back-off over": (sinks_failed(2), [], POLICY, seconds(9), RecoverSinks(18, 6, EpochSet())),
    "sinks failed too often": (
        sinks_failed(4), [], POLICY, seconds(999), Wait("bringing the sinks up to epoch 6 has failed 4 times in a row, the last time because no table; mend the cause, then resume the pipeline"),
    ),
    "sinks failed too often, then resumed": (after(sinks_failed(4), Resumed()), [], POLICY, seconds(1), RecoverSinks(18, 6, EpochSet())),
    "rewound, sinks not committed, run alive": (REWOUND, [Run(RUN, RunKind.REWIND, NOON)], POLICY, seconds(1), Wait("run 3f2a9c1d is bringing the sinks up to epoch 3")),
    "rewound, sinks not committed, run dead": (REWOUND, [], POLICY, seconds(1), RecoverSinks(17, None, EpochSet.of([4, 5]))),
    "rewound while stopped, sinks not committed": (after(STOPPED, rewound(STOPPED, 5)), [], POLICY, seconds(601), RecoverSinks(22, None, EpochSet.of([6]))),
    # A run that the log does not know yet, or no longer waits for
    "a checkpoint run has not begun": (FIVE, [checkpoint_run(seconds(31))], POLICY, seconds(40), Wait("checkpoint run 3f2a9c1d is active")),
    "a cleaning run has not begun": (FIVE, [Run(RUN, RunKind.CLEANUP, seconds(31))], POLICY, seconds(40), Wait("cleaning run 3f2a9c1d is active")),
    "a checkpoint run at the time-out": (FIVE, [checkpoint_run()], POLICY, seconds(600), Wait("checkpoint run 3f2a9c1d is active")),
    "a checkpoint run hangs, given up": (FIVE, [checkpoint_run()], POLICY, seconds(601), start(6, seconds(601))),
    # Cleaning
    "cleaning alive": (CLEANING, [CLEANING_RUN], POLICY, seconds(40), Wait("cleaning run 3f2a9c1d is active")),
    "cleaning without a run": (after(FIVE, cleanup(FIVE, 1)), [], POLICY, seconds(40), Wait("cleaning by a process outside Dagster is active")),
    "cleaning dead": (CLEANING, [], POLICY, seconds(40), AbortCleanup(17, "run 3f2a9c1d ended")),
    "cleaning dead, within the interval": (CLEANING, [], POLICY, seconds(1), AbortCleanup(17, "run 3f2a9c1d ended")),
    "cleaning past the time-out": (CLEANING, [CLEANING_RUN], POLICY, seconds(601), AbortCleanup(17, "run 3f2a9c1d took longer than the time-out of 10 min")),
    "cleaning dead, stopped": (after(STOPPED, cleanup(STOPPED, 1, run_id=RUN)), [], POLICY, seconds(31), AbortCleanup(22, "run 3f2a9c1d ended")),
    "cleaning dead, stop requested": (after(CLEANING, StopRequested()), [], POLICY, seconds(1), AbortCleanup(17, "run 3f2a9c1d ended")),
    # Replays
    "replay dead, nothing due": (REPLAYING, [], POLICY, seconds(1), AbortReplay(4, 1, "run 3f2a9c1d ended")),
    "replay dead, checkpoint due": (REPLAYING, [], POLICY, seconds(31), AbortReplay(4, 1, "run 3f2a9c1d ended")),
    "replay dead, stopped": (after(STOPPED, replay(STOPPED, 4, RUN)), [], POLICY, seconds(31), AbortReplay(4, 1, "run 3f2a9c1d ended")),
    "replay alive, nothing due": (
        REPLAYING, [Run(RUN, RunKind.REPLAY, NOON)], POLICY, seconds(1), Wait("the next checkpoint is due after the interval, 1 s of 30 s"),
    ),
    # Stopping
    "stop requested before the interval": (STOPPING, [], POLICY, seconds(1), start(6, seconds(1), then_stop=True)),
    "stop requested within the pause": (STOPPING, [], CAREFUL, seconds(1), start(6, seconds(1), then_stop=True)),
    "stop requested while cleaning": (after(CLEANING, StopRequested()), [CLEANING_RUN], POLICY, seconds(1), Wait("cleaning run 3f2a9c1d is active")),
    "the last checkpoint is done": (LAST_DONE, [], POLICY, seconds(1), FinishStop(6)),
    "stopped": (STOPPED, [], POLICY, seconds(9999), Wait("stopped at epoch 6; resume to go on")),
    "resumed": (after(STOPPED, Resumed()), [], POLICY, seconds(31), start(7, seconds(31))),
    "resumed before the last checkpoint was recorded": (after(LAST_DONE, Resumed()), [], POLICY, seconds(31), start(7, seconds(31))),
    "stopped again right after resuming": (after(STOPPED, Resumed(), StopRequested()), [], POLICY, seconds(1), start(7, seconds(1), then_stop=True)),
    # Failures
    "back-off after one failure": (
        failed(1), [], POLICY, seconds(4), Wait("epoch 6 has failed once, the last time because the disk was full; waiting to try again, 4 s of 4 s"),
    ),
    "back-off after one failure is over": (failed(1), [], POLICY, seconds(4.5), start(6, seconds(4.5), 2)),
    "back-off after three failures": (
        failed(3), [], POLICY, seconds(15), Wait("epoch 6 has failed 3 times in a row, the last time because the disk was full; waiting to try again, 15 s of 16 s"),
    ),
    "back-off after three failures is over": (failed(3), [], POLICY, seconds(16.5), start(6, seconds(16.5), 4)),
    "tolerable failures used up": (
        failed(4), [], POLICY, seconds(9999), Wait("epoch 6 has failed 4 times in a row, the last time because the disk was full; mend the cause, then resume the pipeline"),
    ),
    "tolerable failures used up, then resumed": (after(failed(4), Resumed()), [], POLICY, seconds(1), start(6, seconds(1), 5)),
    "tolerable failures used up, stop requested": (
        after(failed(4), StopRequested()), [], POLICY, seconds(9999),
        Wait("epoch 6 has failed 4 times in a row, the last time because the disk was full; mend the cause, then resume the pipeline and ask for the stop again"),
    ),
    "back-off has an end": (failed(30), [], replace(POLICY, tolerable_failures=99), seconds(257), start(6, seconds(257), 31)),
    # Catching up
    "a backlog is caught up with at once": (BEHIND, [], POLICY, seconds(0), start(7, NOON)),
    "a backlog, but no catching up": (
        BEHIND, [], replace(POLICY, catch_up=False), seconds(1), Wait("the next checkpoint is due after the interval, 1 s of 30 s"),
    ),
    "a backlog, within the pause": (BEHIND, [], CAREFUL, seconds(5), Wait("pausing after epoch 6, 5 s of 5 s")),
    "a backlog, after the pause": (BEHIND, [], CAREFUL, seconds(5.5), start(7, seconds(5.5))),
    "a rewind leaves a backlog": (after(REWOUND, committed(REWOUND)), [], POLICY, seconds(1), start(6, seconds(1))),
    "a pause longer than the interval": (
        FIVE, [], replace(POLICY, min_pause=pendulum.duration(hours=2)), seconds(3700), Wait("pausing after epoch 5, 1 h 1 min of 2 h"),
    ),
    # A clock that went backwards
    "the clock went back a little": (FIVE, [], POLICY, seconds(-10), Wait("the next checkpoint is due after the interval, 10 s of 30 s")),
    "the clock went back a lot": (FIVE, [], POLICY, seconds(-3600), start(6, seconds(-3600))),
    "the clock went back while in flight": (IN_FLIGHT, [checkpoint_run()], POLICY, seconds(-3600), Wait("epoch 6, attempt 1, is being taken by run 3f2a9c1d for 0 s")),
    "the clock went back while in flight without a run": (
        BY_HAND, [], POLICY, seconds(-3600), AbortCheckpoint(6, 1, "a process outside Dagster took longer than the time-out of 10 min before the epoch was complete"),
    ),
    "the clock went back in a back-off": (failed(1), [], POLICY, seconds(-3600), start(6, seconds(-3600), 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_progress(case: str) -> None:
    state, runs, policy, now, decision = CASES[case]
    assert progress(state, runs, policy, now) == decision


class TestIdleSources:
    def test_are_waited_for_when_the_policy_says_so(self) -> None:
        decision = progress(FIVE, [], SKIPPING, seconds(31), idle=True)
        assert decision == Wait("no source has anything new since epoch 5")

    def test_are_checkpointed_all_the_same_otherwise(self) -> None:
        assert progress(FIVE, [], POLICY, seconds(31), idle=True) == start(6, seconds(31))

    def test_do_not_hold_up_a_stop_or_another_attempt(self) -> None:
        assert isinstance(progress(STOPPING, [], SKIPPING, seconds(1), idle=True), StartCheckpoint)
        assert isinstance(progress(failed(1), [], SKIPPING, seconds(9), idle=True), StartCheckpoint)


CLEANUP_FAILED = after(CLEANING, CleanupAborted(CLEANING.sequence, "killed"))
CLEANUP_FAILED = after(CLEANUP_FAILED, cleanup(CLEANUP_FAILED, 3))
CLEANUP_FAILED = after(CLEANUP_FAILED, CleanupAborted(CLEANUP_FAILED.sequence, "killed"))

CLEANUP_CASES: dict[
    str, tuple[PipelineState, Sequence[Run], DateTime, StartCleanup | AbortCleanup | AbortReplay | Wait]
] = {
    "never created": (PipelineState(), [], NOON, Wait("there is no epoch yet, so there is nothing to clean")),
    "a checkpoint run has not begun": (FIVE, [checkpoint_run()], NOON, Wait("checkpoint run 3f2a9c1d is active; cleaning waits for it")),
    "its own run": (FIVE, [CLEANING_RUN], NOON, StartCleanup()),
    "nothing in the way": (FIVE, [], NOON, StartCleanup()),
    "a checkpoint in flight": (IN_FLIGHT, [], NOON, Wait("epoch 6 is being taken; cleaning waits for it")),
    "sinks catching up": (COMPLETED, [], NOON, StartCleanup()),
    "stopped": (STOPPED, [], NOON, StartCleanup()),
    "a replay alive": (REPLAYING, [Run(RUN, RunKind.REPLAY, NOON)], NOON, Wait("epoch 4 is being replayed; cleaning waits for it")),
    "a replay dead": (REPLAYING, [], NOON, AbortReplay(4, 1, "run 3f2a9c1d ended")),
    "another cleaning alive": (CLEANING, [CLEANING_RUN], NOON, Wait("cleaning run 3f2a9c1d is active")),
    "another cleaning dead": (CLEANING, [], NOON, AbortCleanup(17, "run 3f2a9c1d ended")),
    "failed twice, too soon": (CLEANUP_FAILED, [], seconds(8), Wait("cleaning has failed 2 times in a row, the last time because killed; waiting to try again, 8 s of 8 s")),
    "failed twice, back-off over": (CLEANUP_FAILED, [], seconds(9), StartCleanup()),
}  # fmt: skip


@pytest.mark.parametrize("case", CLEANUP_CASES)
def test_progress_cleanup(case: str) -> None:
    state, runs, now, decision = CLEANUP_CASES[case]
    assert progress_cleanup(state, runs, POLICY, now) == decision


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"interval": pendulum.duration(seconds=-5)}, "interval must be more than zero, not -5 seconds"),
        ({"interval": pendulum.duration()}, "interval must be more than zero, not 0 seconds"),
        ({"timeout": pendulum.duration()}, "timeout must be more than zero"),
        ({"min_pause": pendulum.duration(seconds=-1)}, "min_pause must be zero or more, not -1 seconds"),
        ({"backoff": pendulum.duration(milliseconds=-100)}, r"backoff must be zero or more, not -0.1 seconds"),
        ({"tolerable_failures": -1}, "tolerable_failures must be zero or more, not -1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(changes: dict[str, pendulum.Duration], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        CheckpointPolicy(**changes)  # type: ignore[arg-type]
