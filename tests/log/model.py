"""The log's rules once more, in the simplest words, to hold the real ones against."""

from dataclasses import dataclass, field

from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    CleanupAborted,
    CleanupCompleted,
    CleanupStarted,
    Compacted,
    EpochPinned,
    EpochUnpinned,
    Fact,
    PipelineCreated,
    ReplayFinished,
    ReplayStarted,
    Resumed,
    Rewound,
    SinksCommitted,
    Stopped,
    StopRequested,
)
from arroyo_dagster.model import Plan


@dataclass
class Model:
    """A pipeline as sets, lists and flags. `line` is the head and all of its ancestors, removed or not."""

    entries: int = 0
    line: list[int] = field(default_factory=list)
    winners: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    min_epoch: int = 0
    flight: CheckpointStarted | None = None
    tries: int = 0
    plan: Plan | None = None
    failures: int = 0
    owed: set[int] | None = None
    cleaning: int | None = None
    replays: dict[int, int] = field(default_factory=dict)
    replays_ever: int = 0
    pins: set[int] = field(default_factory=set)
    mode: str = "running"
    final: bool = False

    @property
    def head(self) -> int:
        return self.line[-1] if self.line else 0

    @property
    def live(self) -> set[int]:
        return self.kept & set(self.line)

    def legal(self, fact: Fact) -> bool:
        if isinstance(fact, PipelineCreated) or self.entries == 0:
            return isinstance(fact, PipelineCreated) and self.entries == 0
        match fact:
            case CheckpointStarted(barrier, attempt, parent, plan):
                idle = self.flight is None and self.cleaning is None and self.owed is None and self.mode != "stopped"
                next_one = barrier.epoch == max(self.winners, default=0) + 1 and attempt == self.tries + 1
                asked = barrier.then_stop == (self.mode == "stopping") and barrier.min_epoch == self.min_epoch
                return idle and next_one and asked and parent == self.head and self.plan in (None, plan)
            case CheckpointCompleted(epoch, attempt) | CheckpointAborted(epoch, attempt):
                return self.flight is not None and (epoch, attempt) == (self.flight.barrier.epoch, self.flight.attempt)
            case SinksCommitted(epoch):
                return self.owed is not None and epoch == self.head
            case CleanupStarted(min_epoch, removes):
                idle = self.flight is None and self.cleaning is None and not self.replays
                needed = {self.head} | self.pins | (self.owed or set())
                forward = self.min_epoch <= min_epoch <= max(self.winners, default=0)
                return idle and forward and set(removes) <= self.kept and not set(removes) & needed
            case CleanupCompleted(cleanup) | CleanupAborted(cleanup):
                return self.cleaning == cleanup
            case ReplayStarted(epoch, attempt):
                return self.cleaning is None and epoch in self.live and attempt == self.replays_ever + 1
            case ReplayFinished(epoch, attempt):
                return self.replays.get(attempt) == epoch
            case Rewound(to, supersedes):
                idle = self.flight is None and not self.replays
                return idle and to in self.live | {0} and set(supersedes) == {one for one in self.live if one > to}
            case EpochPinned(epoch):
                return epoch in self.kept
            case EpochUnpinned(epoch):
                return epoch in self.pins
            case StopRequested():
                return self.mode == "running"
            case Stopped(epoch):
                done = self.final and self.flight is None and self.owed is None and epoch == self.head
                return done and self.mode == "stopping"
            case Resumed():
                return self.mode != "running" or self.failures > 0
            case Compacted(epoch):
                return self.flight is None and epoch == self.head

    def accept(self, fact: Fact) -> None:
        assert self.legal(fact), f"{fact} got into the log"
        self.entries += 1
        match fact:
            case CheckpointStarted():
                self.flight, self.tries, self.plan = fact, fact.attempt, fact.plan
            case CheckpointCompleted(epoch, attempt):
                assert self.flight
                assert epoch not in self.winners, "an epoch number was used twice"
                assert all(epoch > one for one in self.winners)
                self.winners[epoch] = attempt
                self.line.append(epoch)
                self.kept.add(epoch)
                self.owed = {epoch}
                self.final = self.flight.barrier.then_stop
                self.flight, self.tries, self.plan, self.failures = None, 0, None, 0
            case CheckpointAborted():
                self.flight = None
                self.failures += 1
            case SinksCommitted():
                self.owed = None
            case CleanupStarted(min_epoch, removes):
                self.cleaning, self.min_epoch = self.entries, min_epoch
                self.kept -= set(removes)
            case CleanupCompleted() | CleanupAborted():
                self.cleaning = None
            case ReplayStarted(epoch, attempt):
                self.replays[attempt], self.replays_ever = epoch, attempt
            case ReplayFinished(attempt=attempt):
                del self.replays[attempt]
            case Rewound(to, supersedes):
                published = (self.owed or set()) - {self.head}
                self.owed = published | set(supersedes)
                self.line = [one for one in self.line if one <= to]
                self.plan, self.failures, self.final = None, 0, False
            case EpochPinned(epoch):
                self.pins.add(epoch)
            case EpochUnpinned(epoch):
                self.pins.discard(epoch)
            case StopRequested():
                self.mode = "stopping"
            case Stopped():
                self.mode = "stopped"
            case Resumed():
                self.mode, self.failures, self.final = "running", 0, False
            case PipelineCreated() | Compacted():
                pass
