"""How far event time has come. Pure: what was read comes in, watermarks go out, in microseconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pendulum import DateTime


@dataclass(frozen=True, slots=True)
class Clock:
    """The event time of one leg of a stage.

    `active_at` is the timestamp of the last barrier that had rows before it. A source that has more to give than an
    epoch may take is not idle (`idle_after` is None). A leg that reads what an earlier stage left has that stage's
    watermark and no delay, and is `asleep` if that stage's own inputs are idle.
    """

    watermark: int | None
    active_at: DateTime
    delay: int = 0
    idle_after: int | None = None
    asleep: bool = False

    def advance(self, latest: int | None, rows: int, barrier: DateTime) -> Clock:
        """Take in an epoch's rows, of which the latest happened at `latest`."""
        known = [time for time in (self.watermark, None if latest is None else latest - self.delay) if time is not None]
        return replace(self, watermark=max(known, default=None), active_at=barrier if rows else self.active_at)

    def idle(self, barrier: DateTime) -> bool:
        """Whether nothing has come for so long that nobody should wait for it."""
        silence = (barrier - self.active_at).total_seconds() * 1_000_000
        return self.asleep or (self.idle_after is not None and silence > self.idle_after)


def combine(clocks: Iterable[Clock], barrier: DateTime, previous: int | None) -> int | None:
    """The watermark behind several legs: the least of those that are not idle, and never one that goes back."""
    every = list(clocks)
    awake = [clock for clock in every if not clock.idle(barrier)] or every
    marks = [clock.watermark for clock in awake]
    if not marks or any(mark is None for mark in marks):
        return previous
    least = min(mark for mark in marks if mark is not None)
    return least if previous is None else max(least, previous)
