"""How far event time has come."""

from typing import Any

import pendulum
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.watermarks import Clock, combine

START = pendulum.datetime(2026, 11, 18)


def at(seconds: float) -> pendulum.DateTime:
    return START.add(microseconds=round(seconds * 1_000_000))


@pytest.mark.parametrize(
    ("watermark", "delay", "latest", "rows", "expected"),
    [
        (None, 0, None, 0, None),
        (None, 0, 100, 1, 100),
        (None, 30, 100, 1, 70),
        (50, 0, 100, 1, 100),
        (100, 0, 50, 1, 100),  # only old rows
        (100, 30, 120, 1, 100),
        (100, 30, 131, 1, 101),
        (100, 0, None, 0, 100),  # no rows
        (100, 0, None, 5, 100),  # rows without a time
        (None, 0, None, 5, None),
        (-100, 0, -50, 1, -50),
    ],
)
def test_a_clock_follows_the_latest_row(
    watermark: int | None, delay: int, latest: int | None, rows: int, expected: int | None
) -> None:
    clock = Clock(watermark, at(0), delay, 60).advance(latest, rows, at(5))
    assert (clock.watermark, clock.active_at) == (expected, at(5) if rows else at(0))
    assert (clock.delay, clock.idle_after) == (delay, 60)


@pytest.mark.parametrize(
    ("idle_after", "silence", "idle"),
    [
        (1_000_000, 0.0, False),
        (1_000_000, 1.0, False),
        (1_000_000, 1.000001, True),
        (0, 0.0, False),
        (0, 0.1, True),
        (None, 1e9, False),
    ],
)
def test_a_clock_is_idle_after_too_long_a_silence(idle_after: int | None, silence: float, idle: bool) -> None:
    assert Clock(1, at(0), 0, idle_after).idle(at(silence)) is idle


def awake(watermark: int | None) -> Clock:
    return Clock(watermark, at(100), 0, 10_000_000)


def idle(watermark: int | None) -> Clock:
    return Clock(watermark, at(0), 0, 10_000_000)


@pytest.mark.parametrize(
    ("clocks", "previous", "expected"),
    [
        ([], None, None),
        ([], 5, 5),
        ([awake(7)], None, 7),
        ([awake(7)], 9, 9),  # it never goes back
        ([awake(7), awake(5)], None, 5),
        ([awake(7), awake(None)], None, None),  # one that has said nothing yet holds the others
        ([awake(7), awake(None)], 3, 3),
        ([awake(7), idle(5)], None, 7),
        ([awake(7), idle(None)], None, 7),
        ([awake(None), idle(5)], 3, 3),
        ([idle(7), idle(5)], None, 5),  # when all are idle, all count
        ([idle(7), idle(None)], 3, 3),
    ],
)
def test_the_least_of_those_that_are_awake_counts(
    clocks: list[Clock], previous: int | None, expected: int | None
) -> None:
    assert combine(clocks, at(100), previous) == expected


epochs = st.lists(
    st.tuples(
        st.floats(0, 100),  # seconds since the last barrier
        st.lists(st.none() | st.integers(-1000, 1000), min_size=2, max_size=2),  # the latest row of each source
    ),
    max_size=30,
)


@given(epochs, st.integers(0, 50), st.none() | st.integers(0, 60_000_000))
def test_a_watermark_never_goes_back_and_never_passes_a_waking_source(
    steps: list[tuple[float, list[int | None]]], delay: int, idle_after: int | None
) -> None:
    now = START
    clocks = [Clock(None, START, delay, idle_after), Clock(None, START, 0, idle_after)]
    watermark: int | None = None
    highest: list[Any] = [None, None]
    for seconds, latest in steps:
        now = now.add(microseconds=round(seconds * 1_000_000))
        clocks = [
            clock.advance(time, 0 if time is None else 1, now) for clock, time in zip(clocks, latest, strict=True)
        ]
        highest = [
            max((t for t in (high, time) if t is not None), default=None)
            for high, time in zip(highest, latest, strict=True)
        ]
        assert [clock.watermark for clock in clocks] == [
            None if high is None else high - clock.delay for high, clock in zip(highest, clocks, strict=True)
        ]
        before, watermark = watermark, combine(clocks, now, watermark)
        if before is not None:
            assert watermark is not None
            assert watermark >= before
        if watermark != before:
            assert watermark is not None
            assert all(
                clock.watermark is not None and watermark <= clock.watermark for clock in clocks if not clock.idle(now)
            )
