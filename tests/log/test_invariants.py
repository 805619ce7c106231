"""Every reason for which a fact is kept out of the log, and that the same fact gets in without it."""

from dataclasses import replace

import pytest

from arroyo_dagster.log import PipelineState
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CleanupAborted,
    CleanupCompleted,
    CleanupStarted,
    Compacted,
    EpochPinned,
    EpochUnpinned,
    Fact,
    PipelineCreated,
    ReplayFinished,
    ReplayOutcome,
    ReplayStarted,
    Resumed,
    Rewound,
    SinksCommitted,
    SinksFailed,
    Stopped,
    StopRequested,
)
from arroyo_dagster.log.invariants import refusal
from arroyo_dagster.model import EpochSet, ObjectPath, Plan
from tests.facts import (
    CREATED,
    aborted,
    after,
    cleanup,
    committed,
    completed,
    file,
    replay,
    rewound,
    started,
    with_epochs,
)

EMPTY = PipelineState()
NEW = with_epochs(0)
FIVE = with_epochs(5)
IN_FLIGHT = after(FIVE, started(FIVE))
COMPLETED = after(IN_FLIGHT, completed(IN_FLIGHT))
ABORTED = after(IN_FLIGHT, aborted(IN_FLIGHT))
CLEANING = after(FIVE, cleanup(FIVE, 1, 2))
REPLAYING = after(FIVE, replay(FIVE, 4))
PINNED = after(FIVE, EpochPinned(2, "x"))
REWOUND = after(FIVE, rewound(FIVE, 3))
STOPPING = after(FIVE, StopRequested())
LAST = after(STOPPING, started(STOPPING))
LAST_DONE = after(LAST, completed(LAST))
STOPPED = after(after(LAST_DONE, committed(LAST_DONE)), Stopped(6))
SINKS_FAILED = after(COMPLETED, SinksFailed(COMPLETED.sequence, "x"))
REWOUND_TO_NOTHING = after(FIVE, rewound(FIVE, 0))
CLEANED = after(CLEANING, CleanupCompleted(CLEANING.sequence, 2, 20))
COMPACTION = Compacted(5, "stats", "partials", (ObjectPath("a"),), (file("b"),))
FINISHED = ReplayFinished(4, 1, ReplayOutcome.IDENTICAL)

LEGAL: list[tuple[PipelineState, Fact]] = [
    (EMPTY, CREATED),
    (NEW, started(NEW)),
    (ABORTED, started(ABORTED)),
    (REPLAYING, started(REPLAYING)),
    (IN_FLIGHT, completed(IN_FLIGHT)),
    (COMPLETED, committed(COMPLETED)),
    (COMPLETED, SinksFailed(COMPLETED.sequence, "x")),
    (SINKS_FAILED, committed(COMPLETED)),
    (SINKS_FAILED, Resumed()),
    (REWOUND, committed(REWOUND)),
    (REWOUND_TO_NOTHING, SinksCommitted(0, REWOUND_TO_NOTHING.sequence)),
    (FIVE, cleanup(FIVE, 1, 2, 4)),
    (CLEANING, CleanupCompleted(CLEANING.sequence, 2, 20)),
    (CLEANING, CleanupAborted(CLEANING.sequence, "x")),
    (CLEANING, EpochPinned(3, "x")),
    (CLEANING, rewound(CLEANING, 4)),
    (IN_FLIGHT, replay(IN_FLIGHT, 5)),
    (FIVE, replay(FIVE, 1)),
    (CLEANED, replay(CLEANED, 4)),
    (CLEANED, Rewound(0, EpochSet.of([1, 2, 3, 4, 5]))),
    (REPLAYING, FINISHED),
    (REPLAYING, replay(REPLAYING, 4)),
    (FIVE, rewound(FIVE, 5)),
    (FIVE, rewound(FIVE, 0)),
    (COMPLETED, rewound(COMPLETED, 2)),
    (PINNED, EpochUnpinned(2)),
    (PINNED, EpochPinned(2, "another label")),
    (REWOUND, EpochPinned(5, "superseded, but still there")),
    (IN_FLIGHT, StopRequested()),
    (STOPPING, Resumed()),
    (STOPPED, Resumed()),
    (ABORTED, Resumed()),
    (STOPPED, rewound(STOPPED, 2)),
    (FIVE, COMPACTION),
]

ILLEGAL: list[tuple[PipelineState, Fact, str]] = [
    (EMPTY, StopRequested(), "the pipeline has not been created yet"),
    (NEW, CREATED, "the pipeline exists already"),
    (EMPTY, PipelineCreated("life", 0, ""), "a pipeline needs at least one key group, not 0"),
    # Starting a checkpoint
    (IN_FLIGHT, started(IN_FLIGHT), "attempt 1 at epoch 6 is in flight"),
    (CLEANING, started(CLEANING), "cleaning 17 is in flight"),
    (COMPLETED, started(COMPLETED), "the sinks have not caught up with epoch 6"),
    (REWOUND, started(REWOUND), "the sinks have not caught up with epoch 3"),
    (STOPPED, started(STOPPED), "the pipeline is stopped at epoch 6"),
    (FIVE, started(NEW), "the next attempt is number 1 at epoch 6, not number 1 at epoch 1"),
    (FIVE, started(ABORTED), "the next attempt is number 1 at epoch 6, not number 2 at epoch 6"),
    (FIVE, replace(started(FIVE), parent=4), "the parent of epoch 6 is the head, epoch 5, not epoch 4"),
    (
        FIVE,
        replace(started(FIVE), barrier=replace(started(FIVE).barrier, min_epoch=3)),
        "the oldest epoch that the rules keep is 0, not 3",
    ),
    (STOPPING, started(FIVE), "the barrier says then_stop=False, but the pipeline is stop requested"),
    (FIVE, started(STOPPING), "the barrier says then_stop=True, but the pipeline is running"),
    (
        ABORTED,
        replace(started(ABORTED), plan=Plan()),
        "epoch 6 has a plan from an earlier attempt, and every attempt follows it",
    ),
    # Ending one
    (FIVE, completed(IN_FLIGHT), "attempt 1 at epoch 6 is not in flight: none is, and the head is epoch 5"),
    (
        ABORTED,
        completed(IN_FLIGHT),
        "attempt 1 at epoch 6 is not in flight: none is, and the head is epoch 5",
    ),
    (
        after(ABORTED, started(ABORTED)),
        completed(IN_FLIGHT),
        "attempt 1 at epoch 6 is not in flight: attempt 2 at epoch 6 is in flight",
    ),
    (
        COMPLETED,
        completed(IN_FLIGHT),
        "attempt 1 at epoch 6 is not in flight: none is, and the head is epoch 6",
    ),
    (
        COMPLETED,
        CheckpointAborted(6, 1, "x"),
        "attempt 1 at epoch 6 is not in flight: none is, and the head is epoch 6",
    ),
    (
        IN_FLIGHT,
        CheckpointCompleted(6, 1, ObjectPath("epochs/6")),
        "the manifest of epoch 6 is epochs/00000000000000000006/attempt-1/manifest.json, not epochs/6",
    ),
    # Sinks
    (FIVE, SinksCommitted(5, 15), "the sinks have nothing to do; the head is epoch 5"),
    (IN_FLIGHT, SinksCommitted(6, 17), "the sinks have nothing to do; the head is epoch 5"),
    (FIVE, SinksFailed(15, "x"), "the sinks have nothing to do; the head is epoch 5"),
    (COMPLETED, SinksCommitted(5, 18), "the sinks have to catch up with the head, epoch 6, not with epoch 5"),
    (COMPLETED, SinksCommitted(6, 15), "the sinks have work from entry 18, no longer from entry 15"),
    (COMPLETED, SinksFailed(15, "x"), "the sinks have work from entry 18, no longer from entry 15"),
    (
        after(REWOUND, rewound(REWOUND, 3)),
        committed(REWOUND),
        "the sinks have work from entry 18, no longer from entry 17",
    ),
    # Cleaning
    (IN_FLIGHT, cleanup(IN_FLIGHT, 1), "attempt 1 at epoch 6 is in flight"),
    (CLEANING, cleanup(CLEANING, 3), "cleaning 17 is in flight"),
    (REPLAYING, cleanup(REPLAYING, 1), "replays of epochs 4 are in flight"),
    (FIVE, cleanup(FIVE, 5), "epochs 5 are the head, pinned or needed by sinks"),
    (PINNED, cleanup(PINNED, 1, 2), "epochs 2 are the head, pinned or needed by sinks"),
    (REWOUND, cleanup(REWOUND, 1, 5), "epochs 5 are the head, pinned or needed by sinks"),
    (CLEANING, CleanupCompleted(3, 0, 0), "cleaning 3 is not in flight"),
    (FIVE, CleanupAborted(17, "x"), "cleaning 17 is not in flight"),
    (FIVE, cleanup(FIVE, 6), "min_epoch goes from 0 to at most 5, not to 6"),
    (FIVE, CleanupStarted(16, 3, EpochSet.of([2, 9]), 0, 0), "epochs 9 are not there to be removed"),
    (CLEANED, CleanupStarted(18, 1, EpochSet(), 0, 0), "min_epoch goes from 2 to at most 5, not to 1"),
    (PINNED, cleanup(FIVE, 1), "the plan was made at entry 16, but the log is at entry 17: plan again"),
    (
        after(CLEANING, CleanupAborted(CLEANING.sequence, "killed")),
        EpochPinned(1, "too late"),
        "epoch 1 does not exist; kept are 3-5",
    ),
    # Replays
    (CLEANING, replay(CLEANING, 4), "cleaning 17 is in flight"),
    (FIVE, replay(FIVE, 6), "epoch 6 cannot be replayed; live epochs are 1-5"),
    (REWOUND, replay(REWOUND, 5), "epoch 5 cannot be replayed; live epochs are 1-3"),
    (CLEANED, replay(CLEANED, 3), "epoch 3 cannot be replayed: cleaning has removed its parent, epoch 2"),
    (REPLAYING, ReplayStarted(4, 1), "the next replay is number 2, not 1"),
    (FIVE, FINISHED, "replay 1 of epoch 4 is not in flight"),
    (REPLAYING, replace(FINISHED, epoch=5), "replay 1 of epoch 5 is not in flight"),
    # Rewinding
    (IN_FLIGHT, rewound(IN_FLIGHT, 3), "attempt 1 at epoch 6 is in flight"),
    (REPLAYING, rewound(REPLAYING, 3), "replays of epochs 4 are in flight"),
    (FIVE, rewound(FIVE, 6), "epoch 6 cannot be rewound to; live epochs are 1-5"),
    (CLEANING, rewound(CLEANING, 2), "epoch 2 cannot be rewound to; live epochs are 3-5"),
    (REWOUND, Rewound(5, EpochSet()), "epoch 5 cannot be rewound to; live epochs are 1-3"),
    (FIVE, Rewound(3, EpochSet.of([5])), "a rewind to epoch 3 supersedes 4-5, not 5"),
    # Pins
    (FIVE, EpochPinned(6, "x"), "epoch 6 does not exist; kept are 1-5"),
    (PINNED, EpochUnpinned(3), "epoch 3 is not pinned; pinned are 2"),
    # Stopping
    (STOPPING, StopRequested(), "the pipeline is already stop requested"),
    (STOPPED, StopRequested(), "the pipeline is already stopped"),
    (FIVE, Stopped(5), "the pipeline is running"),
    (STOPPING, Stopped(5), "the last checkpoint before the stop is not done; the head is epoch 5"),
    (LAST, Stopped(5), "attempt 1 at epoch 6 is in flight"),
    (LAST_DONE, Stopped(6), "the last checkpoint before the stop is not done; the head is epoch 6"),
    (FIVE, Resumed(), "the pipeline is running"),
    # Compaction
    (IN_FLIGHT, COMPACTION, "attempt 1 at epoch 6 is in flight"),
    (NEW, replace(COMPACTION, epoch=0), "epoch 0 was compacted, but the head is epoch 0"),
    (after(FIVE, COMPACTION), replace(COMPACTION, by=(file("c"),)), "a was compacted already"),
    (FIVE, replace(COMPACTION, epoch=4), "epoch 4 was compacted, but the head is epoch 5"),
]


@pytest.mark.parametrize(("state", "fact"), LEGAL)
def test_lets_pass(state: PipelineState, fact: Fact) -> None:
    assert refusal(state, fact) is None


@pytest.mark.parametrize(("state", "fact", "reason"), ILLEGAL)
def test_refuses(state: PipelineState, fact: Fact, reason: str) -> None:
    assert refusal(state, fact) == reason
