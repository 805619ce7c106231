"""Whatever becomes of its runs, a pipeline that only follows the controller gets going again by itself."""

import itertools
import random
from dataclasses import dataclass, field

import pendulum
import pytest
from pendulum import DateTime

from arroyo_dagster import CheckpointPolicy
from arroyo_dagster.controller import (
    AbortCheckpoint,
    AbortCleanup,
    AbortReplay,
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
from arroyo_dagster.log import Mode, PipelineState
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointStarted,
    CleanupAborted,
    CleanupCompleted,
    Fact,
    ReplayFinished,
    ReplayOutcome,
    Resumed,
    SinksFailed,
    Stopped,
    StopRequested,
)
from arroyo_dagster.log.invariants import refusal
from arroyo_dagster.model import Plan
from tests.facts import NOON, after, cleanup, committed, completed, replay, rewound, with_epochs

POLICY = CheckpointPolicy(
    interval=pendulum.duration(seconds=30), timeout=pendulum.duration(seconds=120), tolerable_failures=10**6
)


@dataclass
class World:
    """A pipeline, its runs, and a sensor that does what the controller decides."""

    chance: random.Random
    state: PipelineState = field(default_factory=lambda: with_epochs(0))
    now: DateTime = NOON
    runs: dict[str, Run] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def state_fact(self, fact: Fact) -> bool:
        """State a fact if the log takes it."""
        if refusal(self.state, fact):
            return False
        self.state = after(self.state, fact, at=self.now)
        return True

    def launch(self, kind: RunKind) -> str:
        run_id = f"run-{next(self.ids)}"
        self.runs[run_id] = Run(run_id, kind, self.now)
        return run_id

    def tick(self) -> None:
        """One look of the sensor. What the controller decides, the log must take."""
        self.now = self.now.add(seconds=5)
        match progress(self.state, list(self.runs.values()), POLICY, self.now):
            case StartCheckpoint(barrier, attempt):
                run_id = self.launch(RunKind.CHECKPOINT)
                start = CheckpointStarted(barrier, attempt, self.state.head, self.state.plan or Plan(), run_id)
                assert refusal(self.state, start) is None
                if self.chance.random() < 0.8:  # or the run stays in a queue
                    assert self.state_fact(start)
            case AbortCheckpoint(epoch, attempt, reason):
                assert self.state_fact(CheckpointAborted(epoch, attempt, reason))
            case RecoverSinks():
                self.launch(RunKind.CHECKPOINT)
            case FinishStop(epoch):
                assert self.state_fact(Stopped(epoch))
            case AbortCleanup(number, reason):
                assert self.state_fact(CleanupAborted(number, reason))
            case AbortReplay(epoch, attempt, reason):
                assert self.state_fact(ReplayFinished(epoch, attempt, ReplayOutcome.FAILED, (reason,)))
            case Wait(reason):
                assert reason

    def work(self, trouble: float) -> None:
        """Every run gets on with what it does, dies or hangs."""
        for run_id, run in list(self.runs.items()):
            luck = self.chance.random()
            if luck < trouble:
                del self.runs[run_id]
            elif luck < 2 * trouble:
                self.hung.add(run_id)
            elif run_id not in self.hung:
                self.get_on(run)

    def get_on(self, run: Run) -> None:
        state = self.state
        mine = state.in_flight is not None and state.in_flight.started.run_id == run.run_id
        if run.kind is RunKind.CHECKPOINT and mine:
            self.state_fact(completed(state))
        elif run.kind is RunKind.CHECKPOINT and state.sinks:
            fails = self.chance.random() < 0.2
            self.state_fact(SinksFailed(state.sinks.entry, "no table") if fails else committed(state))
            del self.runs[run.run_id]
        elif run.kind is RunKind.CLEANUP and state.cleanup and state.cleanup.run_id == run.run_id:
            self.state_fact(CleanupCompleted(state.cleanup.cleanup, 0, 0))
            del self.runs[run.run_id]
        elif (
            run.kind is RunKind.CLEANUP
            and progress_cleanup(state, list(self.runs.values()), POLICY, self.now) == StartCleanup()
        ):
            assert self.state_fact(cleanup(state, *list(state.superseded - state.needed_by_sinks), run_id=run.run_id))
        elif run.kind is not RunKind.CLEANUP:
            del self.runs[run.run_id]

    def meddle(self) -> None:
        """What people do in between."""
        live = list(self.state.live)
        match self.chance.randrange(12):
            case 0:
                self.state_fact(StopRequested())
            case 1:
                self.state_fact(Resumed())
            case 2:
                self.state_fact(rewound(self.state, self.chance.choice([0, *live])))
            case 3 if live:
                self.state_fact(replay(self.state, self.chance.choice(live), self.launch(RunKind.REPLAY)))
            case 4 if all(run.kind is not RunKind.CLEANUP for run in self.runs.values()):
                self.launch(RunKind.CLEANUP)
            case _:
                pass


@pytest.mark.parametrize("seed", range(150))
def test_gets_going_again(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(150):
        world.tick()
        world.work(trouble=0.15)
        world.meddle()
    if world.state.mode is not Mode.RUNNING:
        world.state_fact(Resumed())
    before = world.state.last_epoch
    for _ in range(100):
        world.tick()
        world.work(trouble=0)
    assert world.state.last_epoch >= before + 2
    assert not world.state.replays
    assert world.state.cleanup is None
    assert world.state.sinks is None or world.state.sinks.publish == world.state.head
