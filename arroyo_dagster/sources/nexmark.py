"""A source of made-up auctions: persons, their auctions, and bids on these, as Nexmark describes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Literal

import pendulum
import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster.dataflow.source import Offsets, ReadReport, Source, Split
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.model import JsonValue, to_micros
from arroyo_dagster.sources.nexmark_events import KINDS, Clock

_EVENTS_PER_SPLIT = 250_000
_ROWS_PER_BATCH = 1 << 17
_HEAD_START = 60_000_000


class NexmarkSource(Source):
    """Events of one kind of the Nexmark benchmark. Event i is a pure function of i, and needs no storage.

    Events are numbered from 0; of every fifty, the first is a person, the next three are auctions and the other 46
    are bids. Sources of the three kinds with the same arguments are parts of one stream of events: an auction's
    seller, and a bid's auction and bidder, come earlier in it. (Other generators let a few point ahead.)

    Event i happens i / `events_per_second` seconds after `start`, to the microsecond, and is there to be read once
    that time has come. Without `start`, the first epoch sets it to a minute before its own time, so that it has rows;
    from then on the offset holds it. A start in the past makes all events since then available at once.

    `events` ends the stream after so many. An epoch reads at most `max_events_per_epoch`. Both count events of all
    kinds, so that sources of different kinds advance together.

    Changing `events_per_second` moves the times of all events, also of those that were read: replays will differ.
    """

    def __init__(
        self,
        kind: Literal["person", "auction", "bid"],
        *,
        events_per_second: int = 10_000,
        start: str | datetime | None = None,
        events: int | None = None,
        max_events_per_epoch: int = 10_000_000,
    ) -> None:
        """Describe the stream; nothing is made yet."""
        if kind not in KINDS:
            raise ConfigurationError(f"Nexmark has no events of kind {kind!r}: take one of {', '.join(KINDS)}")
        for name, value, least in (
            ("events_per_second", events_per_second, 1),
            ("events", events, 0),
            ("max_events_per_epoch", max_events_per_epoch, 1),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigurationError(
                    f"{name} of a Nexmark source must be a whole number from {least} on, not {value!r}"
                )
        self._kind = kind
        self._rate = events_per_second
        self._start = None if start is None else to_micros(_moment(start))
        self._events = events
        self._max_events = max_events_per_epoch

    @property
    def schema(self) -> pa.Schema:
        """The columns of this kind of events."""
        return KINDS[self._kind].schema

    def latest(self, start: JsonValue, now: DateTime) -> Offsets:
        """Release the events whose time has come. The offset is the time of event 0 and how many events are read."""
        first, done = self._first(now) if start is None else _offset(start)
        available = Clock(first, self._rate).events_until(to_micros(now))
        if self._events is not None:
            available = min(available, self._events)
        end = min(available, done + self._max_events)
        if end <= done:
            return Offsets(start)
        return Offsets({"start": first, "events": end}, backlog=end < available)

    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        """Cut the events into equal ranges, and leave out those without any of this kind."""
        if end is None:
            return []
        first, until = _offset(end)
        done = 0 if start is None else _offset(start)[1]
        rows_before = KINDS[self._kind].rows_before
        splits = []
        for low in range(done, until, _EVENTS_PER_SPLIT):
            high = min(low + _EVENTS_PER_SPLIT, until)
            if rows := rows_before(high) - rows_before(low):
                splits.append(Split({"start": first, "from": low, "to": high}, rows))
        return splits

    def read(self, split: Split, columns: Sequence[str] | None, report: ReadReport) -> Iterator[pa.RecordBatch]:
        """Make the events, in order; only what `columns` asks for is computed."""
        match split.value:
            case {"start": int(start), "from": int(low), "to": int(high)}:
                pass
            case other:
                raise ConfigurationError(f"{other!r} is not a split of a Nexmark source")
        kind = KINDS[self._kind]
        names = kind.schema.names if columns is None else list(columns)
        if unknown := set(names) - set(kind.schema.names):
            raise ConfigurationError(
                f"Nexmark's {self._kind} events have no column {sorted(unknown)[0]!r}: "
                f"there are {', '.join(kind.schema.names)}"
            )
        last = kind.rows_before(high)
        for row in range(kind.rows_before(low), last, _ROWS_PER_BATCH):
            yield kind.batch(row, min(row + _ROWS_PER_BATCH, last), names, Clock(start, self._rate))

    def _first(self, now: DateTime) -> tuple[int, int]:
        if self._start is not None:
            return self._start, 0
        start = to_micros(now) - _HEAD_START
        return start - start % 1_000_000, 0


def _moment(start: str | datetime) -> DateTime:
    try:
        moment = pendulum.parse(start) if isinstance(start, str) else start
    except ValueError as error:
        raise ConfigurationError(_not_a_start(start)) from error
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ConfigurationError(_not_a_start(start))
    return pendulum.instance(moment)


def _not_a_start(start: object) -> str:
    return f"start of a Nexmark source must be a time with its zone, such as '2025-01-01T00:00:00Z', not {start!r}"


def _offset(offset: JsonValue) -> tuple[int, int]:
    match offset:
        case {"start": int(start), "events": int(events)}:
            return start, events
        case _:
            raise ConfigurationError(
                f"{offset!r} is not an offset of a Nexmark source: "
                "give a source of another kind another name, or rewind to epoch 0"
            )
