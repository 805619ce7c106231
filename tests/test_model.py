import dataclasses

import pendulum
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster import CheckpointBarrier
from arroyo_dagster.model import EpochSet, ObjectPath, Plan, SourceRange
from tests.facts import NOON

epochs = st.frozensets(st.integers(1, 40))


class TestCheckpointBarrier:
    def test_has_exactly_the_four_fields(self) -> None:
        assert [field.name for field in dataclasses.fields(CheckpointBarrier)] == [
            "epoch",
            "min_epoch",
            "timestamp",
            "then_stop",
        ]

    def test_cannot_be_changed(self) -> None:
        barrier = CheckpointBarrier(epoch=3, min_epoch=1, timestamp=NOON, then_stop=False)
        with pytest.raises(dataclasses.FrozenInstanceError):
            barrier.epoch = 4  # type: ignore[misc]

    @pytest.mark.parametrize(("epoch", "min_epoch"), [(1, 0), (1, 1), (5, 3)])
    def test_accepts_a_min_epoch_up_to_its_epoch(self, epoch: int, min_epoch: int) -> None:
        assert CheckpointBarrier(epoch, min_epoch, NOON, then_stop=True).epoch == epoch

    @pytest.mark.parametrize(
        ("epoch", "min_epoch", "complaint"),
        [
            (0, 0, "epoch starts at 1, not at 0"),
            (-1, 0, "epoch starts at 1"),
            (3, 4, "between 0 and its epoch 3, not at 4"),
            (3, -1, "not at -1"),
        ],
    )
    def test_refuses_impossible_epochs(self, epoch: int, min_epoch: int, complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            CheckpointBarrier(epoch, min_epoch, NOON, then_stop=False)

    def test_refuses_a_time_without_a_zone(self) -> None:
        with pytest.raises(ValueError, match="needs a time zone, which 2026-11-18T12:00:00 lacks"):
            CheckpointBarrier(1, 0, pendulum.naive(2026, 11, 18, 12), then_stop=False)


class TestObjectPath:
    @pytest.mark.parametrize("path", ["a", "log/1.json", "epochs/1/attempt-1/part 0%20.parquet", "…/é"])
    def test_accepts_plain_names(self, path: str) -> None:
        assert ObjectPath(path) == path

    @pytest.mark.parametrize(
        "path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a\\..\\b", "a\nb", "a\0"]
    )
    def test_refuses_what_could_leave_the_prefix(self, path: str) -> None:
        with pytest.raises(ValueError, match="not a plain name"):
            ObjectPath(path)


class TestEpochSet:
    @given(epochs)
    def test_holds_what_was_put_in(self, members: frozenset[int]) -> None:
        found = EpochSet.of(members)
        assert list(found) == sorted(members)
        assert len(found) == len(members)
        assert {epoch for epoch in range(45) if epoch in found} == members

    @given(epochs, epochs)
    def test_computes_as_a_set_does(self, left: frozenset[int], right: frozenset[int]) -> None:
        a, b = EpochSet.of(left), EpochSet.of(right)
        assert a | b == EpochSet.of(left | right)
        assert a - b == EpochSet.of(left - right)
        assert a & b == EpochSet.of(left & right)

    @given(epochs, st.integers(0, 45))
    def test_cuts_at_an_epoch(self, members: frozenset[int], at: int) -> None:
        assert set(EpochSet.of(members).after(at)) == {epoch for epoch in members if epoch > at}

    def test_reads_as_ranges(self) -> None:
        assert str(EpochSet.of([1, 2, 3, 7, 9, 10])) == "1-3, 7, 9-10"
        assert str(EpochSet()) == "none"

    @pytest.mark.parametrize("ranges", [((0, 1),), ((3, 2),), ((1, 2), (3, 4)), ((5, 6), (1, 2))])
    def test_has_one_form_only(self, ranges: tuple[tuple[int, int], ...]) -> None:
        with pytest.raises(ValueError, match="sorted, apart"):
            EpochSet(ranges)


def test_a_plan_has_a_backlog_when_any_source_has() -> None:
    assert not Plan().backlog
    assert not Plan({"a": SourceRange(0, 1)}).backlog
    assert Plan({"a": SourceRange(0, 1), "b": SourceRange(0, 1, backlog=True)}).backlog
