"""Durations as people write them."""

from datetime import timedelta
from typing import Any

import pendulum
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arroyo_dagster.dataflow.duration import microseconds, parse_duration
from arroyo_dagster.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10 seconds", 10_000_000),
        ("1 second", 1_000_000),
        ("10s", 10_000_000),
        ("  10   sec ", 10_000_000),
        ("0 seconds", 0),
        ("250 ms", 250_000),
        ("3 us", 3),
        ("3 µs", 3),
        ("1.5 hours", 5_400_000_000),
        ("1 hour 30 minutes", 5_400_000_000),
        ("1 hour, 30 minutes and 5 seconds", 5_405_000_000),
        ("1h30m", 5_400_000_000),
        ("2 days", 172_800_000_000),
        ("1 week", 604_800_000_000),
    ],
)
def test_a_text_is_a_duration(text: str, expected: int) -> None:
    assert microseconds(text) == expected
    assert parse_duration(text) == pendulum.duration(microseconds=expected)


@given(st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000)))
def test_a_timedelta_is_exact(value: timedelta) -> None:
    assert timedelta(microseconds=microseconds(value)) == value
    assert parse_duration(value) == value


@given(st.integers(0, 10**6), st.sampled_from(["us", "ms", "s", "min", "h", "d", "w"]))
def test_numbers_and_units_multiply(number: int, unit: str) -> None:
    assert microseconds(f"{number} {unit}") == number * microseconds(f"1 {unit}")


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "10",
        "seconds",
        "10 parsecs",
        "ten seconds",
        "-1 second",
        "1 second 5",
        "1 second, , 2 seconds",
        "1e3 s",
        "1 SECOND",
        "and",
        "1 hourand 2 minutes",
        None,
        10,
        1.5,
        True,
        ["1 s"],
    ],
    ids=repr,
)
def test_anything_else_is_refused_and_named(value: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^the size must be a duration such as '10 seconds'.*, not "
    ) as raised:
        microseconds(value, "the size")
    assert str(raised.value).endswith(f"not {value!r}")
