"""What cleaning would remove, and what it never would."""

from dataclasses import dataclass, field

import pendulum
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pendulum import DateTime

from arroyo_dagster import Retention
from arroyo_dagster.errors import ConfigurationError, DamagedObjectError
from arroyo_dagster.log import PipelineState, names
from arroyo_dagster.log.entries import (
    CleanupAborted,
    CleanupCompleted,
    Compacted,
    EpochPinned,
    EpochUnpinned,
)
from arroyo_dagster.model import CheckpointBarrier, EpochSet, FileEntry, Manifest, ObjectPath, Plan, TableFiles
from arroyo_dagster.retention import CleanupPlan, plan_cleanup
from tests.facts import NOON, aborted, after, committed, completed, file, rewound, started, with_epochs


@dataclass
class World:
    """A pipeline with files: the log's state, and the manifests and files that lie on storage."""

    state: PipelineState = field(default_factory=lambda: with_epochs(0))
    manifests: dict[tuple[int, int], Manifest] = field(default_factory=dict)
    files: dict[ObjectPath, FileEntry] = field(default_factory=dict)
    now: DateTime = NOON

    def live_files(self) -> list[FileEntry]:
        """The files that the next epoch starts from."""
        if self.state.head == 0:
            return []
        files = list(self.manifests[self.state.head, self.state.attempt_of(self.state.head)].files)
        for compaction in self.state.compactions:
            files = [one for one in files if one.path not in compaction.replaced] + list(compaction.by)
        return files

    def attempt(self, dropped: int = 0) -> None:
        """Start an attempt that writes all it has to; some old files are no longer needed."""
        self.state = after(self.state, started(self.state, at=self.now), at=self.now)
        assert self.state.in_flight
        start = self.state.in_flight.started
        new = file(f"{names.attempt(start.barrier.epoch, start.attempt)}/state/new.parquet")
        tables = (TableFiles("stats", "partials", (*self.live_files()[dropped:], new)),)
        self.manifests[start.barrier.epoch, start.attempt] = Manifest(
            start.barrier, start.attempt, start.parent, start.plan, tables
        )
        self.files[new.path] = new

    def die(self, dropped: int = 0) -> None:
        self.attempt(dropped)
        self.state = after(self.state, aborted(self.state), at=self.now)

    def epoch(self, dropped: int = 0, *, commit: bool = True) -> None:
        self.attempt(dropped)
        self.state = after(self.state, completed(self.state), at=self.now)
        if commit:
            self.state = after(self.state, committed(self.state))

    def epochs(self, count: int, every: pendulum.Duration) -> None:
        for _ in range(count):
            self.epoch()
            self.now += every

    def rewind(self, to: int, *, commit: bool = True) -> None:
        self.state = after(self.state, rewound(self.state, to))
        if commit:
            self.state = after(self.state, committed(self.state))

    def compact(self) -> None:
        old = self.live_files()
        new = file(f"compactions/{self.state.sequence}.parquet")
        self.files[new.path] = new
        replaced = tuple(one.path for one in old)
        self.state = after(self.state, Compacted(self.state.head, "stats", "partials", replaced, (new,)))

    def plan(self, policy: Retention) -> CleanupPlan:
        return plan_cleanup(self.state, self.manifests.values(), policy, self.now)

    def clean(self, policy: Retention, steps: int | None = None) -> CleanupPlan:
        """Carry a plan out, or only so many of its steps."""
        plan = self.plan(policy)
        self.state = after(self.state, plan.started())
        by_path = {names.manifest(*key): key for key in self.manifests}
        deletions = [*(one.path for one in plan.files), *plan.manifests]
        for path in deletions[:steps]:
            self.files.pop(path, None)
            self.manifests.pop(by_path.get(path, (0, 0)), None)
        whole = steps is None or steps >= len(deletions)
        end = CleanupCompleted if whole else None
        at = self.state.cleanup.cleanup if self.state.cleanup else 0
        self.state = after(self.state, end(at, 0, 0) if end else CleanupAborted(at, "killed"))
        return plan

    def missing(self) -> list[str]:
        """What a kept epoch, or the next one, needs and storage does not have."""
        gone = [str(epoch) for epoch in self.state.kept if (epoch, self.state.attempt_of(epoch)) not in self.manifests]
        gone += [
            one.path for epoch in self.state.kept for one in self.manifest(epoch).files if one.path not in self.files
        ]
        return gone + [one.path for one in self.live_files() if one.path not in self.files]

    def manifest(self, epoch: int) -> Manifest:
        return self.manifests[epoch, self.state.attempt_of(epoch)]


def hourly_world(count: int) -> World:
    """An epoch every ten minutes, from noon on."""
    world = World()
    world.epochs(count, pendulum.duration(minutes=10))
    return world


class TestRules:
    def test_keep_last(self) -> None:
        plan = hourly_world(10).plan(Retention(keep_last=3))
        assert plan.min_epoch == 8
        assert plan.removes == EpochSet.of(range(1, 7))
        assert plan.kept == {
            7: ("the replay of epoch 8 starts from it",),
            8: ("among the last 3", "the replay of epoch 9 starts from it"),
            9: ("among the last 3", "the replay of epoch 10 starts from it"),
            10: ("among the last 3", "the head"),
        }

    def test_keep_within(self) -> None:
        plan = hourly_world(10).plan(Retention(keep_within=pendulum.duration(minutes=20)))
        assert plan.min_epoch == 9  # it is now 13:40; epoch 9 was taken at 13:20, just within
        assert plan.kept[9] == ("taken within 20 minutes", "the replay of epoch 10 starts from it")

    def test_hourly_keeps_the_newest_of_each_hour(self) -> None:
        plan = hourly_world(20).plan(Retention(hourly=3))  # up to 15:10
        assert [epoch for epoch, why in plan.kept.items() if why[0].startswith("the newest")] == [12, 18, 20]
        assert plan.kept[12] == ("the newest of the hour 2026-11-18 13:00",)

    def test_daily_keeps_the_newest_of_each_day(self) -> None:
        world = World()
        world.epochs(9, pendulum.duration(hours=8))
        plan = world.plan(Retention(daily=2))
        assert list(plan.kept[8]) == [
            "the newest of the day 2026-11-20",
            "the replay of epoch 9 starts from it",
        ]
        assert plan.kept[9][0] == "the newest of the day 2026-11-21"

    def test_hours_and_days_are_those_of_utc(self) -> None:
        world = World(now=pendulum.datetime(2026, 11, 18, 23, 30, tz="America/New_York"))
        world.epoch()
        assert world.plan(Retention(daily=1)).kept[1][0] == "the newest of the day 2026-11-19"

    def test_an_epoch_stays_if_any_rule_keeps_it(self) -> None:
        plan = hourly_world(20).plan(Retention(keep_last=1, hourly=2, keep_within=pendulum.duration(minutes=25)))
        by_rule = {epoch for epoch, why in plan.kept.items() if not why[0].startswith("the replay")}
        assert by_rule == {18, 19, 20}

    @pytest.mark.parametrize(
        ("rules", "complaint"),
        [
            ({}, "needs at least one rule, keep_last=20 for example"),
            ({"keep_last": 0}, "keep_last must be 1 or more, not 0; leave it out for none"),
            ({"hourly": -1}, "hourly must be 1 or more"),
            ({"daily": 0}, "daily must be 1 or more"),
            ({"keep_within": pendulum.duration()}, "keep_within must be more than zero"),
        ],
    )
    def test_rules_that_cannot_be_are_refused(self, rules: dict[str, int], complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            Retention(**rules)  # type: ignore[arg-type]


class TestNeeds:
    LAST = Retention(keep_last=1)

    def test_the_head_stays_whatever_the_rules_say(self) -> None:
        world = hourly_world(3)
        world.now = world.now.add(years=1)
        assert world.plan(Retention(keep_within=pendulum.duration(hours=1))).kept[3] == ("the head",)

    def test_pinned_epochs_stay_and_do_not_hold_min_epoch_back(self) -> None:
        world = hourly_world(6)
        world.state = after(world.state, EpochPinned(2, "before the move"))
        plan = world.plan(self.LAST)
        assert plan.kept[2] == ("pinned as 'before the move'",)
        assert plan.min_epoch == 6
        assert plan.removes == EpochSet.of([3, 4])  # 1 is where the replay of 2 starts, 5 that of 6

    def test_superseded_epochs_go_once_the_sinks_have_retracted_them(self) -> None:
        world = hourly_world(5)
        world.rewind(3, commit=False)
        assert world.plan(self.LAST).kept[5] == ("needed by sinks",)
        world.state = after(world.state, committed(world.state))
        assert world.plan(self.LAST).removes == EpochSet.of([1, 4, 5])

    def test_an_epoch_that_sinks_have_not_published_stays(self) -> None:
        world = hourly_world(2)
        world.epoch(commit=False)
        assert "needed by sinks" in world.plan(self.LAST).kept[3]

    def test_min_epoch_never_goes_back(self) -> None:
        world = hourly_world(8)
        world.state = after(world.state, EpochPinned(2, "x"))
        world.clean(self.LAST)
        world.rewind(2)
        assert world.plan(self.LAST).min_epoch == 8
        world.clean(self.LAST)
        world.epoch()
        assert world.missing() == []

    def test_a_pipeline_that_was_rewound_to_nothing_keeps_nothing(self) -> None:
        world = hourly_world(3)
        world.rewind(0)
        plan = world.clean(self.LAST)
        assert (plan.kept, plan.removes) == ({}, EpochSet.of([1, 2, 3]))
        assert (world.files, world.manifests) == ({}, {})


class TestFiles:
    LAST = Retention(keep_last=1)

    def test_go_when_no_kept_epoch_names_them(self) -> None:
        world = World()
        for _ in range(4):
            world.epoch(dropped=1)
        plan = world.plan(self.LAST)
        new = [f"{names.attempt(epoch, 1)}/state/new.parquet" for epoch in range(1, 5)]
        assert [one.path for one in plan.files] == new[:2]
        assert plan.bytes == 20
        assert plan.manifests == (names.manifest(1, 1), names.manifest(2, 1))

    def test_of_dead_attempts_go(self) -> None:
        world = World()
        world.die()
        world.die()
        world.epoch()
        plan = world.plan(self.LAST)
        assert plan.manifests == (names.manifest(1, 1), names.manifest(1, 2))
        assert len(plan.files) == 2
        assert plan.removes == EpochSet()

    def test_that_a_compaction_made_for_the_next_epoch_stay(self) -> None:
        world = hourly_world(3)
        world.compact()
        world.die()  # it leaves a manifest that names the compacted file
        world.clean(self.LAST)
        assert world.missing() == []
        world.epoch()
        assert world.missing() == []

    def test_nothing_is_planned_when_a_kept_manifest_is_lost(self) -> None:
        world = hourly_world(3)
        del world.manifests[3, 1]
        with pytest.raises(DamagedObjectError, match=r"0003/attempt-1/manifest.json, the manifest of epoch 3, is lost"):
            world.plan(self.LAST)

    def test_of_an_epoch_that_goes_anyway_need_no_manifest(self) -> None:
        world = hourly_world(6)
        del world.manifests[2, 1]
        assert 2 in world.plan(Retention(keep_last=1, hourly=1)).removes

    def test_of_attempts_at_the_next_epoch_stay_for_one_may_go_on_with_them(self) -> None:
        world = hourly_world(3)
        world.die()
        assert world.plan(self.LAST).manifests == (names.manifest(1, 1),)
        world.attempt()
        plan = world.plan(self.LAST)
        assert plan.manifests == (names.manifest(1, 1),)
        assert not {one.path for one in plan.files} & {f"{names.attempt(4, n)}/state/new.parquet" for n in (1, 2)}
        world.state = after(world.state, aborted(world.state))
        world.rewind(2)
        assert {names.manifest(4, 1), names.manifest(4, 2)} <= {*world.plan(self.LAST).manifests}

    def test_that_a_killed_cleaning_left_go_with_the_next(self) -> None:
        world = World()
        for _ in range(9):
            world.epoch(dropped=1)
        whole = world.plan(self.LAST)
        world.clean(self.LAST, steps=3)
        rest = world.plan(self.LAST)
        assert rest.removes == EpochSet()
        assert {one.path for one in whole.files[3:]} <= {one.path for one in rest.files}
        world.clean(self.LAST)
        assert world.missing() == []
        assert len(world.manifests) == 2


policies = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_within=st.none() | st.builds(pendulum.duration, minutes=st.integers(1, 200)),
    hourly=st.none() | st.integers(1, 3),
    daily=st.none() | st.integers(1, 2),
)
steps = st.one_of(
    st.tuples(st.just("epoch"), st.integers(0, 2)),
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.just("rewind"), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("compact")),
    st.tuples(st.just("pin"), st.integers(0, 50)),
    st.tuples(st.just("unpin"), st.integers(0, 50)),
    st.tuples(st.just("wait"), st.integers(1, 2000)),
    st.tuples(st.just("clean"), policies, st.none() | st.integers(0, 6)),
)


def take(world: World, step: tuple[object, ...]) -> None:
    """Do a step if it makes sense just now."""
    live, kept, pins = list(world.state.live), list(world.state.kept), list(world.state.pins)
    match step:
        case ("epoch", int(dropped)):
            world.epoch(dropped)
        case ("die", int(dropped)):
            world.die(dropped)
        case ("rewind", int(choice), bool(commit)):
            world.rewind([0, *live][choice % (len(live) + 1)], commit=commit)
            if not commit:
                check_plan(world, Retention(keep_last=1))
                world.state = after(world.state, committed(world.state))
        case ("compact",) if world.state.head:
            world.compact()
        case ("pin", int(choice)) if kept:
            world.state = after(world.state, EpochPinned(kept[choice % len(kept)], "x"))
        case ("unpin", int(choice)) if pins:
            world.state = after(world.state, EpochUnpinned(pins[choice % len(pins)]))
        case ("wait", int(minutes)):
            world.now = world.now.add(minutes=minutes)
        case ("clean", Retention() as policy, (None | int()) as count):
            check_plan(world, policy)
            world.clean(policy, count)
        case _:
            pass


def check_plan(world: World, policy: Retention) -> None:
    plan, state = world.plan(policy), world.state
    goes = {one.path for one in plan.files}
    for epoch in plan.kept:
        assert goes.isdisjoint(one.path for one in world.manifest(epoch).files)
    assert goes.isdisjoint(one.path for one in world.live_files())
    if state.plan:
        next_one = [world.manifests[key] for key in world.manifests if key[0] == state.next_epoch]
        assert goes.isdisjoint(one.path for manifest in next_one for one in manifest.files)
    assert plan.removes | EpochSet.of(plan.kept) == state.kept
    assert not plan.removes & EpochSet.of(plan.kept)
    assert {*state.pins, *state.needed_by_sinks, *([state.head] if state.head else [])} <= plan.kept.keys()
    assert set(sorted(state.live)[-(policy.keep_last or 1) :]) <= plan.kept.keys()


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_nothing_that_a_kept_epoch_needs_is_ever_deleted(history: list[tuple[object, ...]]) -> None:
    world = World()
    for step in history:
        take(world, step)
        assert world.missing() == []
    world.epoch()  # nothing can go on any more with what dead attempts have left
    world.clean(Retention(keep_last=1))
    # No garbage stays either, but for files of compactions that a rewind made pointless.
    named = {one.path for epoch in world.state.kept for one in world.manifest(epoch).files}
    named |= {one.path for one in world.live_files()}
    assert {path for path in world.files if path not in named and not path.startswith("compactions/")} == set()
    assert len(world.manifests) == len(world.state.kept)


def test_a_barrier_of_a_manifest_gives_its_time() -> None:
    barrier = CheckpointBarrier(3, 1, NOON, then_stop=False)
    manifest = Manifest(barrier, 1, 2, Plan(), ())
    assert (manifest.epoch, list(manifest.files)) == (3, [])
