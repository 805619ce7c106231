"""Durations as people write them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TypeAlias

import pendulum
from pendulum import Duration

from arroyo_dagster.errors import ConfigurationError

DurationLike: TypeAlias = str | timedelta  # pendulum's Duration is a timedelta

_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Zµ]+)\s*(?:,|and\b)?")
_MICROSECONDS = {
    name: scale
    for names, scale in (
        ("us µs microsecond microseconds", 1),
        ("ms millisecond milliseconds", 1_000),
        ("s sec second seconds", 1_000_000),
        ("m min minute minutes", 60_000_000),
        ("h hour hours", 3_600_000_000),
        ("d day days", 86_400_000_000),
        ("w week weeks", 604_800_000_000),
    )
    for name in names.split()
}


def parse_duration(value: DurationLike, what: str = "a duration") -> Duration:
    """Turn "90 seconds", "1 hour 30 minutes" or a timedelta into a duration. `what` names it in errors."""
    return pendulum.duration(microseconds=microseconds(value, what))


def microseconds(value: DurationLike, what: str = "a duration") -> int:
    """Turn a duration into microseconds."""
    if isinstance(value, timedelta):
        return round(value / timedelta(microseconds=1))
    total, at = 0.0, 0
    while isinstance(value, str) and at < len(value):
        part = _PART.match(value, at)
        if part is None or part[2] not in _MICROSECONDS:
            break
        total += float(part[1]) * _MICROSECONDS[part[2]]
        at = part.end()
    else:
        if isinstance(value, str) and value.strip():
            return round(total)
    raise ConfigurationError(f"{what} must be a duration such as '10 seconds' or '1 hour 30 minutes', not {value!r}")
