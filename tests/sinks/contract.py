"""One contract, kept by every sink.

A `Place` is where a sink's output lies. It hands out sinks as if each were in a process of its own, with faults in
the way of its storage, and tells which rows a reader sees.
"""

from __future__ import annotations

import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arroyo_dagster.dataflow.sink import Sink, SinkIdentity
from arroyo_dagster.errors import DamagedObjectError, StorageError
from arroyo_dagster.model import EpochSet, FileEntry, ObjectPath
from arroyo_dagster.sinks.staging import SinkStore
from arroyo_dagster.testing import Crash, Fault, FaultyStore, at_call
from arroyo_dagster.testing.faults import Call, Faults

ONE = SinkIdentity("auctions", "hot", "life-one")
TWO = SinkIdentity("auctions", "hot", "life-two")


class FaultySinkStore(FaultyStore):
    """A sink's storage that fails when it is told to."""

    def __init__(self, store: SinkStore, faults: Faults = lambda _: None) -> None:
        super().__init__(store, faults)
        self._sink_store = store

    def top_names(self) -> list[ObjectPath]:
        with self.failing("top_names", ""):
            return self._sink_store.top_names()

    def written_before(self, prefix: ObjectPath, moment: datetime) -> list[ObjectPath]:
        with self.failing("written_before", prefix):
            return self._sink_store.written_before(prefix, moment)

    def size(self, path: ObjectPath) -> int | None:
        with self.failing("size", path):
            return self._sink_store.size(path)

    def read_range(self, path: ObjectPath, start: int, end: int) -> bytes | None:
        with self.failing("read_range", path):
            return self._sink_store.read_range(path, start, end)

    def move(self, source: ObjectPath, target: ObjectPath) -> bool:
        with self.failing("move", source):
            return self._sink_store.move(source, target)

    @contextmanager
    def failing(self, operation: str, path: str) -> Iterator[None]:
        with self._perhaps_failing(operation, path):
            yield


class Place(ABC):
    files: Mapping[int, tuple[FileEntry, ...]] | None = None

    @abstractmethod
    def sink(self, faults: Faults = lambda _: None) -> Sink:
        """A sink as a new process would have it."""

    @abstractmethod
    def calls(self, sink: Sink) -> list[Call]:
        """The storage calls that this sink has made."""

    @abstractmethod
    def rows(self) -> list[int]:
        """The values that a reader sees, in order."""

    @abstractmethod
    def lose(self, identity: SinkIdentity, epoch: int, file: FileEntry, index: int) -> str:
        """Delete a published file behind the sink's back; tell the name it had."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Leave nothing behind."""


def stage(
    sink: Sink, epoch: int, *tasks: Sequence[int], identity: SinkIdentity = ONE, attempt: int = 1
) -> tuple[FileEntry, ...]:
    """What the tasks of an attempt write, one of them for every sequence of values."""
    files: list[FileEntry] = []
    for task, values in enumerate(tasks):
        writer = sink.writer(identity, epoch, attempt, f"task-{task}")
        if values:
            writer.write(pa.record_batch({"value": pa.array(values, pa.int64()), "text": [f"ü{v}" for v in values]}))
        files += writer.close()
    return tuple(files)


def shown(place: Place, epoch: int, *tasks: Sequence[int], identity: SinkIdentity = ONE) -> tuple[FileEntry, ...]:
    files = stage(place.sink(), epoch, *tasks, identity=identity)
    place.sink().publish(identity, epoch, files)
    return files


def at(number: int, act: Callable[[], object], then: Faults = lambda _: None) -> Faults:
    """Let another process do something just before a call, and perhaps fail later."""

    def faults(call: Call) -> Fault | None:
        if call.number == number:
            act()
        return then(call)

    return faults


class SinkContract(ABC):
    """Subclass it with a fixture `place`."""

    @abstractmethod
    def new_place(self, path: Any) -> Place:
        """A place that nobody has written to."""

    @pytest.fixture(autouse=True)
    def disk_that_needs_no_flushing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)

    @pytest.fixture
    def place(self, tmp_path: Any) -> Place:
        return self.new_place(tmp_path / "first")

    @pytest.fixture
    def places(self, tmp_path: Any) -> Iterator[Place]:
        return (self.new_place(tmp_path / str(number)) for number in range(10_000))

    def test_nothing_shows_before_it_is_published(self, place: Place) -> None:
        files = stage(place.sink(), 1, [1, 2], [3])
        assert sum(file.rows for file in files) == 3
        assert place.rows() == []
        place.sink().publish(ONE, 1, files)
        assert place.rows() == [1, 2, 3]

    def test_publishing_twice_is_the_same_as_once(self, place: Place) -> None:
        files = shown(place, 1, [1, 2], [3])
        shown(place, 2, [4])
        place.sink().publish(ONE, 1, files)
        assert place.rows() == [1, 2, 3, 4]

    def test_only_the_files_of_the_tasks_that_won_appear(self, place: Place) -> None:
        stage(place.sink(), 1, [1, 2], attempt=1)
        files = stage(place.sink(), 1, [1, 2], [1, 2], attempt=2)
        place.sink().publish(ONE, 1, files[:1])
        assert place.rows() == [1, 2]

    def test_epochs_without_rows_are_nothing_special(self, place: Place) -> None:
        assert stage(place.sink(), 1, [], []) == ()
        place.sink().publish(ONE, 1, ())
        shown(place, 2, [2], [])
        place.sink().publish(ONE, 3, ())
        place.sink().publish(ONE, 3, ())
        shown(place, 4, [4])
        place.sink().retract(ONE, EpochSet.of([1, 3]))
        assert place.rows() == [2, 4]

    def test_retracts_once_and_for_all(self, place: Place) -> None:
        files = [shown(place, epoch, [epoch], [epoch * 10]) for epoch in (1, 2, 3)]
        for _ in range(2):
            place.sink().retract(ONE, EpochSet.of([2, 3]))
            assert place.rows() == [1, 10]
        for epoch in (2, 3):
            place.sink().publish(ONE, epoch, files[epoch - 1])
            place.sink().publish(ONE, epoch, stage(place.sink(), epoch, [epoch], attempt=7))
        assert place.rows() == [1, 10]
        shown(place, 4, [4])
        assert place.rows() == [1, 4, 10]

    def test_retracts_what_was_never_published(self, place: Place) -> None:
        place.sink().retract(ONE, EpochSet())
        place.sink().retract(ONE, EpochSet.of([1]))
        files = stage(place.sink(), 2, [2])
        place.sink().retract(ONE, EpochSet.of([2]))
        place.sink().publish(ONE, 2, files)
        assert place.rows() == []
        shown(place, 3, [3])
        assert place.rows() == [3]

    def test_retracting_ten_thousand_epochs_costs_what_their_files_cost(self, place: Place) -> None:
        for epoch in (1, 5_000, 9_000):
            shown(place, epoch, [epoch])
        sink = place.sink()
        sink.retract(ONE, EpochSet(((2, 10_000),)))
        assert place.rows() == [1]
        assert len(place.calls(sink)) < 40
        shown(place, 10_001, [10_001])
        assert place.rows() == [1, 10_001]

    def test_two_lives_in_one_place_leave_each_other_alone(self, place: Place) -> None:
        ones = shown(place, 1, [1])
        shown(place, 1, [100], identity=TWO)
        shown(place, 2, [2])
        place.sink().retract(ONE, EpochSet.of([1, 2]))
        assert place.rows() == [100]
        shown(place, 2, [200], identity=TWO)
        place.sink().publish(ONE, 1, ones)
        assert place.rows() == [100, 200]

    def test_two_sinks_of_one_pipeline_leave_each_other_alone(self, place: Place) -> None:
        shown(place, 1, [1])
        shown(place, 1, [2], identity=SinkIdentity("auctions", "late", "life-one"))
        assert place.rows() == [1, 2]

    def test_odd_names_are_as_good_as_any(self, place: Place) -> None:
        odd = SinkIdentity("auktionen", "heiß ☂/%20", "l/i=f e")
        sink = place.sink()
        writer = sink.writer(odd, 1, 1, "aufgäbe %20 'a' +&=1")
        writer.write(pa.record_batch({"größe": pa.array([1], pa.int64()), "value": pa.array([1], pa.int64())}))
        files = writer.close()
        sink.publish(odd, 1, files)
        assert (place.rows(), sink.missing(odd, 1, files)) == ([1], [])
        sink.retract(odd, EpochSet.of([1]))
        assert place.rows() == []

    def test_says_what_is_missing(self, place: Place) -> None:
        files = stage(place.sink(), 1, [1], [2])
        assert len(place.sink().missing(ONE, 1, files)) == 2
        place.sink().publish(ONE, 1, files)
        assert place.sink().missing(ONE, 1, files) == []
        name = place.lose(ONE, 1, files[1], 1)
        assert place.sink().missing(ONE, 1, files) == [name]

    def test_files_that_are_lost_before_they_are_published_are_named(self, place: Place) -> None:
        files = stage(place.sink(), 7, [1], [2])
        store = place.sink().open_store()  # type: ignore[attr-defined]
        store.delete(files[1].path)
        with pytest.raises(
            DamagedObjectError, match=rf"hot of auctions cannot publish epoch 7.*{files[1].path}.*replay"
        ):
            place.sink().publish(ONE, 7, files)

    def test_many_publish_at_once(self, place: Place) -> None:
        for epoch in (1, 2):
            files = stage(place.sink(), epoch, [epoch], [epoch], [epoch])
            start = threading.Barrier(4)
            failed: list[Exception] = []

            def publish(
                files: Sequence[FileEntry] = files, epoch: int = epoch, start: Any = start, failed: Any = failed
            ) -> None:
                sink = place.sink()
                start.wait()
                try:
                    sink.publish(ONE, epoch, files)
                except Exception as error:
                    failed.append(error)

            threads = [threading.Thread(target=publish) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failed == []
        assert place.rows() == [1, 1, 1, 2, 2, 2]

    @pytest.mark.parametrize("fault", Fault)
    def test_one_fault_anywhere_changes_nothing_in_the_end(self, places: Iterator[Place], fault: Fault) -> None:
        calls = self.live(next(places), lambda _: None)
        assert calls > 15
        for number in range(1, calls + 1):
            place = next(places)
            with pytest.raises((StorageError, Crash)):
                self.live(place, at_call(number, fault))
            self.live(place, lambda _: None)
            assert place.rows() == [1, 2, 4], f"call {number}"

    def live(self, place: Place, faults: Faults) -> int:
        """Publish two epochs, retract the second and publish a third, whatever of it was done before."""
        files = place.files or {
            1: stage(place.sink(), 1, [1], [2]),
            3: stage(place.sink(), 3, [3], [3]),
            4: stage(place.sink(), 4, [4]),
        }
        place.files = files
        sink = place.sink(faults)
        sink.publish(ONE, 1, files[1])
        sink.publish(ONE, 3, files[3])
        sink.retract(ONE, EpochSet.of([3]))
        sink.publish(ONE, 4, files[4])
        return len(place.calls(sink))

    def test_another_process_may_publish_in_between(self, places: Iterator[Place]) -> None:
        for number in range(1, 100):
            place = next(places)
            files = stage(place.sink(), 1, [1], [2])
            sink = place.sink(at(number, partial(place.sink().publish, ONE, 1, files)))
            sink.publish(ONE, 1, files)
            assert place.rows() == [1, 2]
            if len(place.calls(sink)) < number:
                return
        pytest.fail("publishing takes for ever")

    @pytest.mark.parametrize("dies", [False, True])
    def test_another_process_may_retract_in_between(self, places: Iterator[Place], dies: bool) -> None:
        """A zombie goes on publishing, or dies a few calls later; the next epoch's publisher cleans up after it."""
        for number in range(1, 100):
            for later in range(number, number + 5) if dies else [0]:
                place = next(places)
                files = stage(place.sink(), 1, [1], [2])
                crash = at_call(later, Fault.CRASH_AFTER)
                retract = at(number, partial(place.sink().retract, ONE, EpochSet.of([1])), crash)
                zombie = place.sink(retract)
                try:
                    zombie.publish(ONE, 1, files)
                    if len(place.calls(zombie)) < number:
                        return
                    assert place.rows() == [], f"call {number}"
                except Crash:
                    pass
                shown(place, 2, [2])
                assert place.rows() == [2], f"calls {number} and {later}"
        pytest.fail("publishing takes for ever")

    def test_another_process_may_publish_while_one_retracts(self, places: Iterator[Place]) -> None:
        for number in range(1, 100):
            place = next(places)
            files = stage(place.sink(), 1, [1], [2])

            def publish(place: Place = place, files: Sequence[FileEntry] = files) -> None:
                try:
                    place.sink().publish(ONE, 1, files)
                except DamagedObjectError:
                    pytest.fail("a retracted epoch is not missed")

            sink = place.sink(at(number, publish))
            sink.retract(ONE, EpochSet.of([1]))
            assert place.rows() == [], f"call {number}"
            if len(place.calls(sink)) < number:
                return
        pytest.fail("retracting takes for ever")

    def test_a_sink_is_pickled_with_nothing_but_its_configuration(self, tmp_path: Any) -> None:
        kind = type(self).kind  # type: ignore[attr-defined]
        sink = kind(str(tmp_path / "nowhere"), storage_options={"region": "x"})
        copy = pickle.loads(pickle.dumps(sink))  # noqa: S301 - made right here
        assert vars(copy) == vars(sink)
        assert not (tmp_path / "nowhere").exists()


class SinkMachine(RuleBasedStateMachine):
    """Any order of epochs, rewinds, crashes and zombies, as the log allows them, against a set of rows."""

    new_place: Callable[[], Place]

    def __init__(self) -> None:
        super().__init__()
        self.place = type(self).new_place()
        self.files: dict[int, tuple[FileEntry, ...]] = {}
        self.values: dict[int, list[int]] = {}
        self.live: list[int] = []
        self.next = 1
        self.to_publish: int | None = None
        self.to_retract = EpochSet()

    @property
    def settled(self) -> bool:
        return self.to_publish is None and not self.to_retract.ranges

    @precondition(lambda self: self.settled)
    @rule(tasks=st.lists(st.integers(0, 2), max_size=2), dead=st.booleans())
    def checkpoint(self, tasks: list[int], dead: bool) -> None:
        epoch, self.next = self.next, self.next + 1
        counter = iter(range(epoch * 100, epoch * 100 + 100))
        values = [[next(counter) for _ in range(rows)] for rows in tasks]
        if dead:
            stage(self.place.sink(), epoch, *values)
        self.files[epoch] = stage(self.place.sink(), epoch, *values, attempt=2)
        self.values[epoch] = [value for task in values for value in task]
        self.live.append(epoch)
        self.to_publish = epoch

    @precondition(lambda self: self.live and not self.to_retract.ranges)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        keep = data.draw(st.integers(0, len(self.live) - 1))
        self.to_retract = EpochSet.of(self.live[keep:])
        del self.live[keep:]
        self.to_publish = None

    @rule(call=st.integers(1, 15), fault=st.sampled_from(Fault))
    def bring_the_sink_up_to_date_with_a_fault(self, call: int, fault: Fault) -> None:
        try:
            self.bring_up_to_date(self.place.sink(at_call(call, fault)))
        except (StorageError, Crash):
            return

    @rule()
    def bring_the_sink_up_to_date(self) -> None:
        self.bring_up_to_date(self.place.sink())

    def bring_up_to_date(self, sink: Sink) -> None:
        if self.to_publish is not None:
            sink.publish(ONE, self.to_publish, self.files[self.to_publish])
            self.to_publish = None
        if self.to_retract.ranges:
            sink.retract(ONE, self.to_retract)
            self.to_retract = EpochSet()

    @precondition(lambda self: self.files)
    @rule(data=st.data(), call=st.integers(1, 20), fault=st.sampled_from(Fault))
    def zombie(self, data: st.DataObject, call: int, fault: Fault) -> None:
        """Somebody who does not know what has happened since publishes again."""
        known = [epoch for epoch in self.files if epoch != self.to_publish and epoch not in self.to_retract]
        if not known:
            return
        epoch = data.draw(st.sampled_from(known))
        try:
            self.place.sink(at_call(call, fault)).publish(ONE, epoch, self.files[epoch])
        except (StorageError, Crash):
            return

    @invariant()
    def readers_see_what_they_should(self) -> None:
        if self.settled:
            assert self.place.rows() == sorted(value for epoch in self.live for value in self.values[epoch])

    def teardown(self) -> None:
        try:
            self.bring_up_to_date(self.place.sink())
            self.readers_see_what_they_should()
        finally:
            self.place.close()


def machine(new_place: Callable[[], Place], examples: int) -> Any:
    """A test case of the state machine for one kind of place."""
    case = type("Machine", (SinkMachine,), {"new_place": staticmethod(new_place)}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=examples, stateful_step_count=15, deadline=None)
    return case
