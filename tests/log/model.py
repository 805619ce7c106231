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
    SinksFailed,
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
    sink_failures: int = 0
    work: int | None = None
    publish: int | None = None
    retract: set[int] = field(default_factory=set)
    compacted: set[str] = field(default_factory=set)
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

    @property
    def needed_by_sinks(self) -> set[int]:
        return (self.retract | {self.publish or 0}) & self.kept

    def legal(self, fact: Fact) -> bool:
        if isinstance(fact, PipelineCreated) or self.entries == 0:
            return isinstance(fact, PipelineCreated) and self.entries == 0
        match fact:
            case CheckpointStarted(barrier, attempt, parent, plan):
                idle = self.flight is None and self.cleaning is None and self.work is None and self.mode != "stopped"
                next_one = barrier.epoch == max(self.winners, default=0) + 1 and attempt == self.tries + 1
                asked = barrier.then_stop == (self.mode == "stopping") and barrier.min_epoch == self.min_epoch
                return idle and next_one and asked and parent == self.head and self.plan in (None, plan)
            case CheckpointCompleted(epoch, attempt) | CheckpointAborted(epoch, attempt):
                return self.flight is not None and (epoch, attempt) == (self.flight.barrier.epoch, self.flight.attempt)
            case SinksCommitted(epoch, work):
                return self.work is not None and work == self.work and epoch == self.head
            case SinksFailed(work):
                return self.work is not None and work == self.work
            case CleanupStarted(planned_at, min_epoch, removes):
                idle = self.flight is None and self.cleaning is None and not self.replays and planned_at == self.entries
                needed = {self.head} | self.pins | self.needed_by_sinks
                forward = self.min_epoch <= min_epoch <= max(self.winners, default=0)
                return idle and forward and set(removes) <= self.kept and not set(removes) & needed
            case CleanupCompleted(cleanup) | CleanupAborted(cleanup):
                return self.cleaning == cleanup
            case ReplayStarted(epoch, attempt):
                parent = max((one for one in self.line if one < epoch), default=0)
                possible = epoch in self.live and parent in self.kept | {0}
                return self.cleaning is None and possible and attempt == self.replays_ever + 1
            case ReplayFinished(epoch, attempt):
                return self.replays.get(attempt) == epoch
            case Rewound(to, supersedes):
                idle = self.flight is None and not self.replays
                return idle and to in self.live | {0} and set(supersedes) == {one for one in self.line if one > to}
            case EpochPinned(epoch):
                return epoch in self.kept
            case EpochUnpinned(epoch):
                return epoch in self.pins
            case StopRequested():
                return self.mode == "running"
            case Stopped(epoch):
                done = self.final and self.flight is None and self.work is None and epoch == self.head
                return done and self.mode == "stopping"
            case Resumed():
                return self.mode != "running" or self.failures > 0 or self.sink_failures > 0
            case Compacted(epoch, replaced=replaced):
                return self.flight is None and 0 < epoch == self.head and not self.compacted & set(replaced)

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
                self.work, self.publish, self.retract = self.entries, epoch, set()
                self.final = self.flight.barrier.then_stop and self.mode == "stopping"
                self.flight, self.tries, self.plan, self.failures = None, 0, None, 0
                self.compacted = set()
            case CheckpointAborted():
                self.flight = None
                self.failures += 1
            case SinksCommitted():
                self.work, self.publish, self.retract, self.sink_failures = None, None, set(), 0
            case SinksFailed():
                self.sink_failures += 1
            case CleanupStarted(min_epoch=min_epoch, removes=removes):
                self.cleaning, self.min_epoch = self.entries, min_epoch
                self.kept -= set(removes)
            case CleanupCompleted() | CleanupAborted():
                self.cleaning = None
            case ReplayStarted(epoch, attempt):
                self.replays[attempt], self.replays_ever = epoch, attempt
            case ReplayFinished(attempt=attempt):
                del self.replays[attempt]
            case Rewound(to, supersedes):
                self.work, self.sink_failures = self.entries, 0
                self.publish = self.publish if self.publish == to else None
                self.retract |= set(supersedes)
                self.compacted = set()
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
                self.mode, self.failures, self.sink_failures, self.final = "running", 0, 0, False
            case Compacted(replaced=replaced):
                self.compacted |= set(replaced)
            case PipelineCreated():
                pass
