"""Reading and extending the log: races, unclear writes, snapshots, damage."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from arroyo_dagster.errors import ConfigurationError, DamagedObjectError, ProtocolError, StorageError
from arroyo_dagster.log import (
    Appended,
    Creation,
    Log,
    Lost,
    ObjectStorage,
    PipelineState,
    Refused,
    Store,
    names,
    open_store,
)
from arroyo_dagster.log.documents import pack_entry
from arroyo_dagster.log.entries import (
    CheckpointCompleted,
    CheckpointStarted,
    Entry,
    EpochPinned,
    Fact,
    SinksCommitted,
    StopRequested,
)
from arroyo_dagster.model import JsonValue, ObjectPath, Plan, SourceRange
from arroyo_dagster.testing import Call, Fault, FaultyStore
from tests.facts import CREATED, NOON, append, append_epoch, completed, started


def nested(depth: int) -> JsonValue:
    value: JsonValue = 0
    for _ in range(depth):
        value = [value]
    return value


def new_log(store: Store, who: str = "ann", snapshot_every: int = 8) -> Log:
    return Log(store, who, sleep=lambda _: None, snapshot_every=snapshot_every)


@pytest.fixture
def store(memory_store: ObjectStorage) -> ObjectStorage:
    return memory_store


@pytest.fixture
def log(store: ObjectStorage) -> Log:
    log = new_log(store)
    append(log, CREATED)
    return log


class TestAppending:
    def test_a_log_that_nobody_has_written_to_is_empty(self, store: ObjectStorage) -> None:
        assert new_log(store).read() == PipelineState()

    def test_what_one_writes_others_read(self, store: ObjectStorage, log: Log) -> None:
        state = append_epoch(log)
        assert state.head == 1
        assert new_log(store).read() == state

    def test_who_wrote_and_when_stands_in_the_entry(self, store: ObjectStorage) -> None:
        log = Log(store, "ann", clock=lambda: NOON)
        outcome = log.append(log.read(), CREATED)
        assert isinstance(outcome, Appended)
        assert outcome.entry.writer.startswith("ann/")
        assert outcome.entry.timestamp == NOON
        assert list(log.entries()) == [outcome.entry]

    def test_whoever_comes_second_is_told_who_won_and_what_the_state_is_now(
        self, store: ObjectStorage, log: Log
    ) -> None:
        slow, stale = new_log(store, "bob"), log.read()
        append(log, StopRequested())
        outcome = slow.append(stale, started(stale))
        assert isinstance(outcome, Lost)
        assert outcome.winner.writer.startswith("ann/")
        assert outcome.winner.fact == StopRequested()
        assert outcome.state == log.read()

    def test_two_that_write_the_same_fact_at_the_same_time_do_not_both_win(self, store: ObjectStorage) -> None:
        twins = [Log(store, "run 1", clock=lambda: NOON) for _ in range(2)]
        outcomes = [twin.append(PipelineState(), CREATED) for twin in twins]
        assert [type(outcome) for outcome in outcomes] == [Appended, Lost]

    def test_what_breaks_an_invariant_is_refused_and_nothing_is_written(self, store: ObjectStorage, log: Log) -> None:
        before = store.names(ObjectPath("log"))
        assert log.append(log.read(), SinksCommitted(1, 1)) == Refused(
            "the sinks have nothing to do; the head is epoch 0"
        )
        assert store.names(ObjectPath("log")) == before

    @pytest.mark.parametrize(
        "fact",
        [
            EpochPinned(1, 5),  # type: ignore[arg-type]
            CheckpointCompleted(1, 1, "../elsewhere"),  # type: ignore[arg-type]
            EpochPinned(1, object()),  # type: ignore[arg-type]
        ],
    )
    def test_what_could_not_be_read_back_is_not_written(self, store: ObjectStorage, log: Log, fact: Fact) -> None:
        append_epoch(log)
        before = store.names(ObjectPath("log"))
        with pytest.raises(ConfigurationError, match="cannot be written to the log"):
            log.append(log.read(), fact)
        assert store.names(ObjectPath("log")) == before

    @pytest.mark.parametrize(
        "offset",
        [float("nan"), float("inf"), {"a", "b"}, 10**5000, nested(2000)],
        ids=["nan", "infinity", "set", "huge", "deep"],
    )
    def test_an_offset_that_is_no_json_is_not_written(self, log: Log, offset: JsonValue) -> None:
        with pytest.raises(ConfigurationError, match="cannot be written to the log"):
            log.append(log.read(), started(log.read(), plan=Plan({"bids": SourceRange(0, offset)})))

    def test_whoever_writes_sees_what_everybody_else_will_read(self, store: ObjectStorage, log: Log) -> None:
        plan = Plan({"bids": SourceRange((1, 2), {3: 4})})  # type: ignore[arg-type, dict-item]
        state = append(log, started(log.read(), plan=plan))
        assert state == new_log(store).read()
        assert state.plan == Plan({"bids": SourceRange([1, 2], {"3": 4})})

    def test_storage_that_overwrites_what_it_should_create_is_found_out(self, store: ObjectStorage) -> None:
        class Careless(FaultyStore):
            def create(self, path: ObjectPath, data: bytes) -> Creation:
                self.delete(path)
                return super().create(path, data)

        with pytest.raises(ConfigurationError, match=r"at memory://memory overwrites objects .*If-None-Match"):
            new_log(Careless(store)).append(PipelineState(), CREATED)
        assert store.names(ObjectPath("log")) == store.names(ObjectPath("probes")) == []


class TestUnclearWrites:
    """`after`: the write happened, but its answer was lost."""

    def faulty(self, store: ObjectStorage, *faults: tuple[str, Fault]) -> FaultyStore:
        """Fail as told, one call after the other, at writes and reads of entry 2."""
        remaining = list(faults)

        def decide(call: Call) -> Fault | None:
            if remaining and call.operation == remaining[0][0] and names.log_entry(2) in call.path:
                return remaining.pop(0)[1]
            return None

        return FaultyStore(store, decide)

    @pytest.mark.parametrize(
        "faults",
        [
            [("create", Fault.BEFORE)],
            [("create", Fault.AFTER)],
            [("create", Fault.AFTER), ("read", Fault.BEFORE)],
            [("create", Fault.BEFORE), ("create", Fault.AFTER)],
            [("create", Fault.BEFORE), ("read", Fault.AFTER), ("create", Fault.AFTER), ("read", Fault.BEFORE)],
        ],
    )
    def test_are_settled_by_reading_back(self, store: ObjectStorage, log: Log, faults: list[tuple[str, Fault]]) -> None:
        state = log.read()
        outcome = new_log(self.faulty(store, *faults), "bob").append(state, started(state))
        assert isinstance(outcome, Appended)
        assert log.read() == outcome.state
        assert len(list(log.entries())) == 2

    def test_that_another_has_won_are_lost(self, store: ObjectStorage, log: Log) -> None:
        state = log.read()
        append(log, StopRequested())
        outcome = new_log(self.faulty(store, ("create", Fault.BEFORE)), "bob").append(state, started(state))
        assert isinstance(outcome, Lost)
        assert outcome.winner.fact == StopRequested()

    @pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER])
    def test_that_stay_unclear_are_an_error_and_the_log_tells_later(
        self, store: ObjectStorage, log: Log, fault: Fault
    ) -> None:
        state = log.read()
        broken = FaultyStore(store, lambda _: fault)
        with pytest.raises(StorageError, match=rf"not known whether memory://memory/{names.log_entry(2)} was written"):
            new_log(broken, "bob").append(state, started(state))
        assert (log.read().in_flight is not None) == (fault is Fault.AFTER)


class TestSnapshots:
    def test_deleting_them_changes_nothing(self, store: ObjectStorage, log: Log) -> None:
        for _ in range(20):
            append_epoch(log)
        with_snapshots = new_log(store).read()
        for path in store.names(names.SNAPSHOTS):
            store.delete(path)
        assert new_log(store).read() == with_snapshots == log.read()

    def test_keep_reading_short(self, store: ObjectStorage, log: Log) -> None:
        calls = []
        for _ in range(3):
            for _ in range(40):
                append_epoch(log)
            counting = FaultyStore(store)
            new_log(counting).read()
            calls.append(len(counting.calls))
        assert max(calls) <= 5
        assert len(store.names(names.SNAPSHOTS)) == 2

    def test_are_made_by_whoever_finds_them_wanting(self, store: ObjectStorage) -> None:
        never = new_log(store, snapshot_every=10**9)
        append(never, CREATED)
        for _ in range(10):
            append_epoch(never)
        assert store.names(names.SNAPSHOTS) == []
        append_epoch(new_log(store))
        assert len(store.names(names.SNAPSHOTS)) == 1

    @pytest.mark.parametrize("damage", [b"", b'{"version": 1}', b'{"version": 9}'])
    def test_that_are_damaged_are_passed_over_with_a_word(
        self, store: ObjectStorage, log: Log, damage: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(20):
            append_epoch(log)
        newest = store.names(names.SNAPSHOTS)[-1]
        store.delete(newest)
        store.create(newest, damage)
        with caplog.at_level(logging.WARNING):
            assert new_log(store).read() == log.read()
        assert newest in caplog.text
        assert "the log is read without it" in caplog.text

    def test_that_cannot_be_written_only_cost_time(
        self, store: ObjectStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = new_log(FaultyStore(store, lambda call: Fault.BEFORE if names.SNAPSHOTS in call.path else None))
        with pytest.raises(StorageError):
            log.read()  # a listing that fails may hide a snapshot: it is not taken for an empty one
        log = new_log(
            FaultyStore(
                store,
                lambda call: Fault.BEFORE if call.operation == "create" and names.SNAPSHOTS in call.path else None,
            )
        )
        append(log, CREATED)
        for _ in range(5):
            append_epoch(log)
        assert "no snapshot was made, which only costs time" in caplog.text
        assert new_log(store).read().head == 5

    def test_with_numbers_beyond_the_log_do_not_push_out_the_real_ones(self, store: ObjectStorage, log: Log) -> None:
        for foreign in (10**9, 10**9 + 1):
            store.create(names.snapshot(foreign), b"foreign")
        for _ in range(20):
            append_epoch(log)
        assert len(store.names(names.SNAPSHOTS)) == 4
        counting = FaultyStore(store)
        assert new_log(counting).read() == log.read()
        assert len(counting.calls) <= 7

    def test_that_are_recent_are_enough(self, store: ObjectStorage, log: Log) -> None:
        for _ in range(20):
            append_epoch(log)
        before = store.names(names.SNAPSHOTS)
        append(new_log(store), StopRequested())
        assert store.names(names.SNAPSHOTS) == before

    def test_in_the_wrong_place_are_passed_over_with_a_word(
        self, store: ObjectStorage, log: Log, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(20):
            append_epoch(log)
        older, newest = store.names(names.SNAPSHOTS)
        [data] = store.read([older])
        store.delete(newest)
        store.create(newest, data or b"")
        assert new_log(store).read() == log.read()
        assert f"{newest} is misplaced: it stands behind entry {names.snapshot_sequence(older)}" in caplog.text

    def test_that_are_gone_cost_few_calls_even_then(self, store: ObjectStorage) -> None:
        log = new_log(store, snapshot_every=10**9)
        append(log, CREATED)
        for _ in range(40):
            append_epoch(log)
        counting = FaultyStore(store)
        assert new_log(counting).read().sequence == 121
        assert len(counting.calls) <= 8

    def test_foreign_objects_beside_them_are_left_alone(self, store: ObjectStorage, log: Log) -> None:
        store.create(ObjectPath("snapshots/note.txt"), b"hello")
        for _ in range(20):
            append_epoch(log)
        assert new_log(store).read() == log.read()
        assert store.read([ObjectPath("snapshots/note.txt")]) == [b"hello"]


class TestDamage:
    def overwrite(self, store: ObjectStorage, sequence: int, data: bytes | None) -> None:
        store.delete(names.log_entry(sequence))
        if data is not None:
            store.create(names.log_entry(sequence), data)

    def test_a_truncated_entry_is_named(self, store: ObjectStorage, log: Log) -> None:
        append_epoch(log)
        [data] = store.read([names.log_entry(3)])
        assert data
        self.overwrite(store, 3, data[: len(data) // 2])
        with pytest.raises(DamagedObjectError, match=rf"memory://memory/{names.log_entry(3)} is damaged"):
            new_log(store).read()

    @pytest.mark.parametrize("sequence", [1, 2, 3, 4, 9, 16, 30])
    def test_a_lost_entry_is_named(self, store: ObjectStorage, sequence: int) -> None:
        log = new_log(store, snapshot_every=10**9)
        append(log, CREATED)
        for _ in range(20):
            append_epoch(log)
        self.overwrite(store, sequence, None)
        with pytest.raises(DamagedObjectError, match=rf"{names.log_entry(sequence)} is lost: restore it"):
            new_log(store).read()

    def test_an_entry_that_contradicts_the_log_is_named(self, store: ObjectStorage, log: Log) -> None:
        append_epoch(log)
        foreign = Entry(5, "eve/1", NOON, EpochPinned(9, "x"))
        store.create(names.log_entry(5), pack_entry(foreign))
        with pytest.raises(ProtocolError, match=r"0005.json by eve/1 contradicts the log: epoch 9 does not exist"):
            log.read()

    def test_a_snapshot_of_a_log_that_is_gone_is_not_believed(self, store: ObjectStorage, log: Log) -> None:
        for _ in range(10):
            append_epoch(log)
        for path in store.names(ObjectPath("log")):
            store.delete(path)
        with pytest.raises(DamagedObjectError, match=r"is lost or replaced.* delete the snapshots to go on"):
            new_log(store).read()

    def test_a_snapshot_of_another_log_of_the_same_length_is_not_believed(self, store: ObjectStorage, log: Log) -> None:
        for _ in range(10):
            append_epoch(log)
        for path in store.names(ObjectPath("log")):
            store.delete(path)
        twin = new_log(open_store("memory://"), "twin")
        append(twin, CREATED)
        for _ in range(10):
            append_epoch(twin)
        for entry in twin.entries():
            store.create(names.log_entry(entry.sequence), pack_entry(entry))
        with pytest.raises(DamagedObjectError, match=r"is lost or replaced"):
            new_log(store).read()

    def test_a_pipeline_that_was_deleted_and_made_anew_is_read_anew(self, store: ObjectStorage, log: Log) -> None:
        append_epoch(log)
        for path in store.names(ObjectPath("log")):
            store.delete(path)
        other = new_log(store, "bob")
        append(other, CREATED)
        for _ in range(5):
            append_epoch(other)
        assert log.read() == other.read()

    def test_an_entry_that_appears_while_others_are_read_is_no_damage(self, store: ObjectStorage) -> None:
        late = names.log_entry(2)

        class Slow(FaultyStore):
            """Its first look at entry 2 comes before it is written, the look at entry 3 after."""

            looks = 0

            def read(self, paths: Sequence[ObjectPath]) -> list[bytes | None]:
                found = super().read(paths)
                if late in paths:
                    self.looks += 1
                    if self.looks == 1:
                        found[list(paths).index(late)] = None
                return found

        log = new_log(store)
        append(log, CREATED)
        append(log, started(log.read()))
        append(log, completed(log.read()))
        assert [entry.sequence for entry in new_log(Slow(store)).entries(after=1)] == [2, 3]


def test_a_read_on_local_disk_sees_what_another_process_wrote(local_store: ObjectStorage, tmp_path: Path) -> None:
    log = new_log(local_store.below("auctions"))
    append(log, CREATED)
    state = append(log, started(log.read()))
    assert isinstance(list(log.entries())[-1].fact, CheckpointStarted)
    assert (tmp_path / "state/auctions/log/00000000000000000002.json").exists()
    assert new_log(local_store.below("auctions")).read() == state
