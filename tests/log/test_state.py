"""What the fold makes of the facts."""

from arroyo_dagster.log import Mode, PipelineState, names
from arroyo_dagster.log.entries import (
    CleanupAborted,
    CleanupCompleted,
    Compacted,
    EpochPinned,
    EpochUnpinned,
    ReplayFinished,
    ReplayOutcome,
    Resumed,
    SinksFailed,
    Stopped,
    StopRequested,
)
from arroyo_dagster.log.state import Failures
from arroyo_dagster.model import EpochSet, ObjectPath, Plan, SourceRange
from tests.facts import (
    CREATED,
    NOON,
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


def test_a_new_pipeline_has_nothing_but_its_key_groups() -> None:
    state = after(PipelineState(), CREATED)
    assert (state.key_groups, state.fingerprint, state.next_epoch) == (128, "f", 1)
    assert not PipelineState().created
    assert state.created


def test_an_epoch_exists_once_it_is_completed() -> None:
    state = with_epochs(2)
    state = after(state, started(state))
    assert (state.head, state.live) == (2, EpochSet.of([1, 2]))
    state = after(state, completed(state), at=NOON.add(minutes=1))
    assert (state.head, state.next_epoch, state.live) == (3, 4, EpochSet.of([1, 2, 3]))
    assert state.completed_at == NOON.add(minutes=1)
    assert state.needed_by_sinks == EpochSet.of([3])
    state = after(state, committed(state))
    assert state.needed_by_sinks == EpochSet()


def test_the_next_attempt_inherits_number_and_plan_of_one_that_died() -> None:
    state = with_epochs(2)
    plan = Plan({"bids": SourceRange(10, 20)})
    state = after(state, started(state, plan=plan))
    state = after(state, aborted(state, "disk full"), at=NOON.add(seconds=9))
    assert (state.next_epoch, state.attempts, state.plan) == (3, 1, plan)
    assert state.failures == Failures(1, "disk full", NOON.add(seconds=9))
    state = after(state, started(state))
    state = after(state, completed(state))
    assert state.manifest_of(3) == names.manifest(3, 2)
    assert state.manifest_of(2) == names.manifest(2, 1)
    assert (state.attempts, state.plan, state.failures) == (0, None, Failures())


def test_a_backlog_lasts_until_an_epoch_without_one() -> None:
    state = with_epochs(1)
    state = after(state, started(state, plan=Plan({"bids": SourceRange(1, 2, backlog=True)})))
    state = after(state, completed(state))
    assert state.backlog
    assert not with_epochs(1, after(state, committed(state))).backlog


def test_a_rewind_supersedes_what_came_after_and_numbers_go_on() -> None:
    state = with_epochs(5)
    state = after(state, rewound(state, 2, "r"))
    assert (state.head, state.next_epoch) == (2, 6)
    assert (state.live, state.superseded) == (EpochSet.of([1, 2]), EpochSet.of([3, 4, 5]))
    assert state.needed_by_sinks == EpochSet.of([3, 4, 5])
    assert state.backlog
    state = after(state, committed(state))
    state = with_epochs(1, state)
    assert state.live == EpochSet.of([1, 2, 6])
    assert state.parent_of(6) == 2


def test_a_rewind_before_the_sinks_caught_up_leaves_nothing_to_publish() -> None:
    state = with_epochs(3)
    state = after(state, started(state))
    state = after(state, completed(state))
    state = after(state, rewound(state, 3))
    state = after(state, rewound(state, 1))
    assert state.sinks
    assert (state.sinks.publish, state.sinks.retract) == (None, EpochSet.of([2, 3, 4]))


def test_a_rewind_past_removed_epochs_retracts_them_too() -> None:
    state = with_epochs(8)
    state = after(state, cleanup(state, 3, 4, 5, 6))
    state = after(state, CleanupCompleted(state.sequence, 4, 4))
    state = after(state, rewound(state, 2))
    assert state.sinks
    assert state.sinks.retract == EpochSet.of([3, 4, 5, 6, 7, 8])
    assert state.needed_by_sinks == EpochSet.of([7, 8])
    assert (state.live, state.superseded) == (EpochSet.of([1, 2]), EpochSet.of([7, 8]))


def test_a_rewind_to_the_head_does_not_forget_to_publish_it() -> None:
    state = with_epochs(3)
    state = after(state, started(state))
    state = after(state, completed(state))
    state = after(state, rewound(state, 4))
    assert state.sinks
    assert (state.sinks.publish, state.sinks.retract, state.backlog) == (4, EpochSet(), False)


def test_a_rewind_keeps_a_backlog() -> None:
    state = with_epochs(1)
    state = after(state, started(state, plan=Plan({"bids": SourceRange(1, 2, backlog=True)})))
    state = after(state, completed(state))
    assert after(state, rewound(state, 2)).backlog


def test_sinks_that_fail_keep_their_work_and_resuming_forgives_them() -> None:
    state = with_epochs(1)
    state = after(state, started(state))
    state = after(state, completed(state))
    work = state.sequence
    state = after(state, SinksFailed(work, "no table"), SinksFailed(work, "no route"), at=NOON)
    assert state.sinks
    assert (state.sinks.publish, state.sinks.failures) == (2, Failures(2, "no route", NOON))
    state = after(state, Resumed())
    assert state.sinks
    assert (state.sinks.publish, state.sinks.failures) == (2, Failures())


def test_a_rewind_forgets_the_plan_but_not_the_attempts() -> None:
    state = with_epochs(3)
    state = after(state, started(state))
    state = after(state, aborted(state))
    state = after(state, rewound(state, 2))
    assert (state.plan, state.attempts, state.failures) == (None, 1, Failures())
    assert started(state).attempt == 2


def test_cleaning_removes_epochs_when_it_starts_even_if_it_never_ends() -> None:
    state = with_epochs(5)
    state = after(state, cleanup(state, 1, 2, run_id="r"), at=NOON)
    assert (state.live, state.min_epoch) == (EpochSet.of([3, 4, 5]), 2)
    assert state.cleanup
    failed = after(state, CleanupAborted(state.sequence, "killed"), at=NOON)
    assert (failed.cleanup, failed.live) == (None, state.live)
    assert failed.cleanup_failures == Failures(1, "killed", NOON)
    again = after(failed, cleanup(failed, 3))
    done = after(again, CleanupCompleted(again.sequence, 1, 1))
    assert (done.cleanup, done.cleanup_failures) == (None, Failures())


def test_what_holds_for_one_epoch_only_leaves_with_it() -> None:
    state = with_epochs(1)
    state = after(state, started(state))
    state = after(state, aborted(state))
    state = with_epochs(2, state)
    assert state.retried == {2: 2}
    assert after(state, cleanup(state, 1, 2)).retried == {}


def test_the_state_stays_small_however_many_epochs_there_are() -> None:
    state = with_epochs(2000)
    assert len(state.live) == 2000
    assert state.live.ranges == ((1, 2000),)
    assert not state.retried


def test_pins_come_and_go() -> None:
    state = after(with_epochs(2), EpochPinned(1, "a"), EpochPinned(2, "b"))
    assert state.pins == {1: "a", 2: "b"}
    assert after(state, EpochUnpinned(1)).pins == {2: "b"}


def test_the_latest_replay_of_a_kept_epoch_counts() -> None:
    def replayed(state: PipelineState, epoch: int, outcome: ReplayOutcome) -> PipelineState:
        begun = after(state, replay(state, epoch))
        return after(begun, ReplayFinished(epoch, begun.replays_started, outcome))

    state = with_epochs(4)
    for epoch in (1, 2, 3):
        state = replayed(state, epoch, ReplayOutcome.IDENTICAL)
    state = replayed(state, 2, ReplayOutcome.DIFFERENT)
    state = replayed(state, 3, ReplayOutcome.FAILED)
    assert (state.verified, state.differing) == (EpochSet.of([1, 3]), EpochSet.of([2]))
    state = replayed(state, 2, ReplayOutcome.IDENTICAL)
    assert (state.verified, state.differing) == (EpochSet.of([1, 2, 3]), EpochSet())
    state = after(state, cleanup(state, 1))
    assert state.verified == EpochSet.of([2, 3])


def test_replays_run_side_by_side() -> None:
    state = with_epochs(3)
    state = after(state, replay(state, 1, "r1"))
    state = after(state, replay(state, 1, "r2"))
    state = after(state, ReplayFinished(1, 1, ReplayOutcome.DIFFERENT, ("stats.partials",)))
    assert [(one.started.attempt, one.started.run_id) for one in state.replays] == [(2, "r2")]
    assert state.replays_started == 2


def test_a_stop_waits_for_its_last_checkpoint_and_resume_ends_it() -> None:
    state = after(with_epochs(2), StopRequested())
    assert state.mode is Mode.STOP_REQUESTED
    state = with_epochs(1, state)
    assert state.final
    state = after(state, Stopped(3))
    assert state.mode is Mode.STOPPED
    state = after(state, Resumed())
    assert (state.mode, state.final) == (Mode.RUNNING, False)


def test_a_stop_that_was_taken_back_does_not_end_the_next_one() -> None:
    state = after(with_epochs(2), StopRequested())
    state = after(state, started(state))
    state = after(state, Resumed())
    assert not after(state, completed(state)).final


def test_resuming_forgives_failures() -> None:
    state = with_epochs(1)
    for _ in range(3):
        state = after(state, started(state))
        state = after(state, aborted(state))
    assert state.failures.count == 3
    assert after(state, Resumed()).failures == Failures()


def test_compactions_wait_for_the_next_epoch_of_the_same_line() -> None:
    state = with_epochs(2)
    compaction = Compacted(2, "stats", "partials", (ObjectPath("a"), ObjectPath("b")), (file("c"),))
    state = after(state, compaction)
    assert state.compactions == (compaction,)
    assert after(state, rewound(state, 1)).compactions == ()
    in_flight = after(state, started(state))
    assert after(in_flight, aborted(in_flight)).compactions == (compaction,)
    assert after(in_flight, completed(in_flight)).compactions == ()
