"""Several writers on one log, any of which may fail, crash, sleep and wake at any storage call."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import HealthCheck, event, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from arroyo_dagster import Retention
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import Appended, Log, Lost, PipelineState, Refused, names, open_store
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.log.documents import unpack_entry
from arroyo_dagster.log.entries import (
    CheckpointAborted,
    CheckpointCompleted,
    CheckpointStarted,
    CleanupAborted,
    CleanupCompleted,
    Compacted,
    Entry,
    EpochPinned,
    EpochUnpinned,
    Fact,
    ReplayFinished,
    ReplayOutcome,
    Resumed,
    SinksCommitted,
    SinksFailed,
    Stopped,
    StopRequested,
)
from arroyo_dagster.log.state import SinkWork, apply
from arroyo_dagster.model import FileEntry, Manifest, ObjectPath, TableFiles
from arroyo_dagster.retention import CleanupPlan, plan_cleanup
from arroyo_dagster.testing import Call, Crash, Fault, FaultyStore
from tests.facts import CREATED, NOON, file, replay, rewound, started
from tests.log.model import Model

WRITERS = st.integers(0, 2)
FAULTS = st.none() | st.none() | st.tuples(st.integers(1, 8), st.sampled_from(Fault))
FRESH = st.sampled_from([True, True, False])
CHOICE = st.integers(0, 20)


@dataclass
class Writer:
    """A process: what it last saw of the log, and what it believes to be doing. All of it may be out of date."""

    name: str
    store: FaultyStore
    log: Log = field(init=False)
    seen: PipelineState = field(default_factory=PipelineState)
    attempts: list[CheckpointStarted] = field(default_factory=list)
    plan: CleanupPlan | None = None
    compaction: Compacted | None = None
    cleanups: list[tuple[int, list[ObjectPath]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = Log(self.store, self.name, clock=lambda: NOON, sleep=lambda _: None, snapshot_every=5)

    def restart(self) -> None:
        """Lose all that was in memory."""
        self.__post_init__()
        self.seen, self.attempts, self.cleanups = PipelineState(), [], []
        self.plan, self.compaction = None, None


class LogMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.storage = open_store("memory://")
        self.writers = [Writer(f"writer {number}", FaultyStore(self.storage)) for number in range(3)]
        self.model = Model()
        self.sink: set[int] = set()
        self.retracted: set[int] = set()
        self.history: list[Entry] = []
        self.states = [PipelineState()]
        self.act(self.writers[0], lambda _: CREATED)

    # What writers do

    # Get on: most of what can go wrong needs some epochs, some attempts and some removed files to go wrong with.

    @rule(who=WRITERS)
    def take_an_epoch(self, who: int) -> None:
        self.start(who, None, True)
        self.complete(who, None, True, -1)
        self.commit_sinks(who, None, True)

    @rule(who=WRITERS, keep=st.integers(1, 3))
    def clean_up(self, who: int, keep: int) -> None:
        self.plan_cleaning(who, keep)
        self.start_cleaning(who, None, True)
        self.delete(who, None, -1, 1000)
        self.end_cleaning(who, None, True, -1, True)

    @rule(who=WRITERS)
    def start_over(self, who: int) -> None:
        self.start(who, None, True)
        self.abort(who, None, True)
        self.start((who + 1) % 3, None, True)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH)
    def start(self, who: int, fault: tuple[int, Fault] | None, fresh: bool) -> None:
        writer = self.writers[who]
        if appended := self.act(writer, started, fault, fresh):
            assert isinstance(appended.entry.fact, CheckpointStarted)
            writer.attempts.append(appended.entry.fact)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, which=CHOICE)
    def complete(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, which: int) -> None:
        """Complete an attempt that this writer has begun, however long ago and whatever became of it since."""
        writer = self.writers[who]
        if not writer.attempts:
            return
        start = writer.attempts[which % len(writer.attempts)]
        epoch, attempt = start.barrier.epoch, start.attempt
        written = False
        with self.failing(writer, fault):
            written = self.write_attempt(writer, start)
        if written:
            manifest = names.manifest(epoch, attempt)
            self.act(writer, lambda _: CheckpointCompleted(epoch, attempt, manifest), fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH)
    def abort(self, who: int, fault: tuple[int, Fault] | None, fresh: bool) -> None:
        def make(state: PipelineState) -> Fact | None:
            running = state.in_flight.started if state.in_flight else None
            return CheckpointAborted(running.barrier.epoch, running.attempt, "dead") if running else None

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH)
    def commit_sinks(self, who: int, fault: tuple[int, Fault] | None, fresh: bool) -> None:
        """Publish and retract what the log says, then say that it is done. All of it may have been done before."""

        def make(state: PipelineState) -> Fact | None:
            if state.sinks is None:
                return None
            self.publish(state.sinks)
            return SinksCommitted(state.head, state.sinks.entry)

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH)
    def fail_sinks(self, who: int, fault: tuple[int, Fault] | None, fresh: bool) -> None:
        def make(state: PipelineState) -> Fact | None:
            return SinksFailed(state.sinks.entry, "no table") if state.sinks else None

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, keep=st.integers(1, 3))
    def plan_cleaning(self, who: int, keep: int) -> None:
        writer = self.writers[who]
        writer.plan = plan_cleanup(writer.log.read(), self.manifests(), Retention(keep_last=keep), NOON)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH)
    def start_cleaning(self, who: int, fault: tuple[int, Fault] | None, fresh: bool) -> None:
        """Put a plan into force, however old it is."""
        writer = self.writers[who]
        plan = writer.plan
        if plan and (appended := self.act(writer, lambda _: plan.started(), fault, fresh)):
            writer.cleanups.append((appended.entry.sequence, [*(one.path for one in plan.files), *plan.manifests]))

    @rule(who=WRITERS, fault=FAULTS, which=CHOICE, count=st.integers(1, 5))
    def delete(self, who: int, fault: tuple[int, Fault] | None, which: int, count: int) -> None:
        """Go on with a cleaning that this writer has begun, even if it was declared dead since."""
        writer = self.writers[who]
        if writer.cleanups:
            _, deletions = writer.cleanups[which % len(writer.cleanups)]
            with self.failing(writer, fault):
                for path in deletions[:count]:
                    writer.store.delete(path)
                    deletions.remove(path)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, which=CHOICE, whole=st.booleans())
    def end_cleaning(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, which: int, whole: bool) -> None:
        writer = self.writers[who]
        mine = [sequence for sequence, _ in writer.cleanups]

        def make(state: PipelineState) -> Fact | None:
            if whole and mine:
                return CleanupCompleted(mine[which % len(mine)], 0, 0)
            return CleanupAborted(state.cleanup.cleanup, "dead") if state.cleanup else None

        self.act(writer, make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, which=CHOICE)
    def rewind(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, which: int) -> None:
        def make(state: PipelineState) -> Fact:
            targets = [0, *state.live]
            return rewound(state, targets[which % len(targets)])

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, which=CHOICE, pin=st.booleans())
    def pin(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, which: int, pin: bool) -> None:
        def make(state: PipelineState) -> Fact:
            epoch = some_epoch(state, which)
            return EpochPinned(epoch, "x") if pin else EpochUnpinned(epoch)

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, which=CHOICE)
    def start_replay(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, which: int) -> None:
        self.act(self.writers[who], lambda state: replay(state, some_epoch(state, which)), fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, which=CHOICE)
    def end_replay(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, which: int) -> None:
        def make(state: PipelineState) -> Fact | None:
            if not state.replays:
                return None
            one = state.replays[which % len(state.replays)].started
            return ReplayFinished(one.epoch, one.attempt, ReplayOutcome.IDENTICAL)

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH, step=st.sampled_from(["stop", "stopped", "resume"]))
    def stop_and_go(self, who: int, fault: tuple[int, Fault] | None, fresh: bool, step: str) -> None:
        def make(state: PipelineState) -> Fact:
            if step == "stopped":
                return Stopped(state.head)
            return StopRequested() if step == "stop" else Resumed()

        self.act(self.writers[who], make, fault, fresh)

    @rule(who=WRITERS, fault=FAULTS, which=CHOICE)
    def merge_files(self, who: int, fault: tuple[int, Fault] | None, which: int) -> None:
        writer = self.writers[who]
        with self.failing(writer, fault):
            state = writer.log.read()
            old = self.live_files(state)[: 1 + which % 4]
            new = file(f"compactions/{writer.name}-{len(writer.store.calls)}.parquet")
            writer.store.create(new.path, json.dumps(self.rows(old)).encode())
            replaced = tuple(one.path for one in old)
            writer.compaction = Compacted(state.head, "stats", "partials", replaced, (new,))

    @rule(who=WRITERS, fault=FAULTS, fresh=FRESH)
    def compact(self, who: int, fault: tuple[int, Fault] | None, fresh: bool) -> None:
        """State a compaction, however long ago it was made."""
        writer = self.writers[who]
        self.act(writer, lambda _: writer.compaction, fault, fresh)

    @rule(who=WRITERS)
    def restart(self, who: int) -> None:
        self.writers[who].restart()

    @rule()
    def delete_snapshots(self) -> None:
        for path in self.storage.names(names.SNAPSHOTS):
            self.storage.delete(path)

    # What must hold

    @invariant()
    def everybody_reads_the_same_and_it_is_what_the_model_says(self) -> None:
        state = Log(self.storage, "reader").read()
        assert state == self.states[-1]
        model = self.model
        assert (state.sequence, state.head, state.min_epoch) == (model.entries, model.head, model.min_epoch)
        assert (set(state.live), set(state.kept)) == (model.live, model.kept)
        assert {epoch: state.attempt_of(epoch) for epoch in state.kept} == {
            epoch: model.winners[epoch] for epoch in model.kept
        }
        assert set(state.needed_by_sinks) == model.needed_by_sinks
        assert (state.sinks.entry if state.sinks else None) == model.work
        assert set(state.pins) == model.pins
        assert (state.in_flight.started if state.in_flight else None) == model.flight

    @invariant()
    def sinks_that_have_caught_up_show_the_head_and_its_ancestors_and_nothing_else(self) -> None:
        assert self.sink <= set(self.model.winners), "an epoch was published that never completed"
        if self.model.work is None:
            assert self.sink == set(self.model.line)

    @invariant()
    def the_next_epoch_starts_from_every_row_once(self) -> None:
        assert sorted(self.rows(self.live_files(self.states[-1]))) == self.model.line

    @invariant()
    def everything_that_a_kept_epoch_needs_is_there(self) -> None:
        state = Log(self.storage, "reader").read()
        needed = {state.manifest_of(epoch) for epoch in state.kept}
        for epoch in state.kept:
            manifest = self.manifest(epoch, state.attempt_of(epoch))
            needed |= {one.path for one in manifest.files}
        needed |= {one.path for compaction in state.compactions for one in compaction.by}
        paths = sorted(needed)
        lost = [path for path, data in zip(paths, self.storage.read(paths), strict=True) if data is None]
        assert lost == []

    # How

    def act(
        self,
        writer: Writer,
        make: Callable[[PipelineState], Fact | None],
        fault: tuple[int, Fault] | None = None,
        fresh: bool = True,
    ) -> Appended | None:
        """Let a writer append what it makes of the state it knows, and hold the outcome against storage."""
        fact, outcome, before = None, None, len(self.history)
        with self.failing(writer, fault):
            if fresh:
                writer.seen = writer.log.read()
            fact = make(writer.seen)
            if fact is not None:
                outcome = writer.log.append(writer.seen, fact)
        current = writer.seen.sequence == before
        possible = fact is not None and self.model.legal(fact)
        self.observe()
        new = self.history[before:]
        note(f"{writer.name}: {fact} -> {type(outcome).__name__}, {len(new)} new")
        match outcome:
            case Appended(entry, state):
                event(f"{type(fact).__name__} got in")
                assert new == [entry]
                assert current
                writer.seen = state
                return outcome
            case Lost(winner, state):
                event(f"{type(fact).__name__} was lost")
                assert not new
                assert not current
                assert winner == self.history[winner.sequence - 1]
                assert winner.sequence <= state.sequence
                writer.seen = state
            case Refused():
                event(f"{type(fact).__name__} was refused")
                assert not new
                assert not (current and possible)
            case None:
                assert [entry.fact for entry in new] in ([], [fact])
        return None

    @contextmanager
    def failing(self, writer: Writer, fault: tuple[int, Fault] | None) -> Iterator[None]:
        begun = len(writer.store.calls)

        def decide(call: Call) -> Fault | None:
            return fault[1] if fault and call.number == begun + fault[0] else None

        writer.store.faults = decide
        try:
            yield
        except StorageError as error:
            note(f"{writer.name}: {error}")
        except Crash as crash:
            note(f"{writer.name}: {crash}")
            writer.restart()
        finally:
            writer.store.faults = lambda _: None

    def observe(self) -> None:
        """See what is on storage, and have the model judge it."""
        while True:
            sequence = len(self.history) + 1
            [data] = self.storage.read([names.log_entry(sequence)])
            if data is None:
                return
            entry = unpack_entry(data, sequence, "storage")
            self.model.accept(entry.fact)
            self.history.append(entry)
            self.states.append(apply(self.states[-1], entry))

    def write_attempt(self, writer: Writer, start: CheckpointStarted) -> bool:
        """Write an attempt's files and its manifest, again if need be, and even if it was given up since."""
        epoch, attempt = start.barrier.epoch, start.attempt
        begun = next(state for state in self.states if state.in_flight and state.in_flight.started == start)
        try:
            inherited = self.live_files(begun)
        except FileNotFoundError:
            return False  # it was given up, and cleaning has taken the epoch that it stood on
        new = file(f"{names.attempt(epoch, attempt)}/state/new.parquet")
        tables = (TableFiles("stats", "partials", (*inherited, new)),)
        manifest = Manifest(start.barrier, attempt, start.parent, start.plan, tables)
        writer.store.create(new.path, json.dumps([epoch]).encode())
        writer.store.create(names.manifest(epoch, attempt), json.dumps(encode(manifest)).encode())
        return True

    def publish(self, work: SinkWork) -> None:
        """Do what every sink must: publishing twice is publishing once, and what was retracted stays so."""
        self.retracted |= set(work.retract)
        self.sink |= {work.publish} if work.publish else set()
        self.sink -= self.retracted

    def rows(self, files: Iterable[FileEntry]) -> list[int]:
        """Every epoch adds one row to the state: its own number."""
        contents = self.storage.read([one.path for one in files])
        return [row for content in contents for row in json.loads(content or b"")]

    def live_files(self, state: PipelineState) -> list[FileEntry]:
        if state.head == 0:
            return []
        files = list(self.manifest(state.head, state.attempt_of(state.head)).files)
        for compaction in state.compactions:
            files = [one for one in files if one.path not in compaction.replaced] + list(compaction.by)
        return files

    def manifest(self, epoch: int, attempt: int) -> Manifest:
        [data] = self.storage.read([names.manifest(epoch, attempt)])
        if data is None:
            raise FileNotFoundError(f"the manifest of epoch {epoch}, attempt {attempt}, is gone")
        return decode(Manifest, json.loads(data), "storage")

    def manifests(self) -> list[Manifest]:
        paths = [path for path in self.storage.names(ObjectPath("epochs")) if path.endswith("manifest.json")]
        return [decode(Manifest, json.loads(data), "storage") for data in self.storage.read(paths) if data]


def some_epoch(state: PipelineState, which: int) -> int:
    """One that exists, or the next one, which does not."""
    epochs: list[int] = [*state.kept, state.next_epoch]
    return epochs[which % len(epochs)]


LogMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLogMachine = LogMachine.TestCase
