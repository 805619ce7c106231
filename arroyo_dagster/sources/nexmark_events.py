"""Nexmark's events as columns: what is in event i follows from i alone, and only what is asked for is computed.

Of every fifty events in a row the first is a person, the next three are auctions and the rest are bids. Numbers come
from a hash of the event's number and the field's name, so any range can be made anywhere, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint64]
Columns: TypeAlias = Mapping[str, Callable[[], pa.Array]]

TIME = pa.timestamp("us", "UTC")

_GROUP = 50
_AUCTIONS_IN_GROUP = 3
_FIRST_PERSON = 1000
_FIRST_AUCTION = 1000
_FIRST_CATEGORY = 10
_CATEGORIES = 5
_HOT_AUCTIONS, _HOT_BIDDERS, _HOT_SELLERS, _HOT_CHANNELS = 2, 4, 4, 2  # all but one in so many go to a hot one
_HOT_EVERY = 100  # one in so many auctions and persons is hot, in its time
_AUCTIONS_IN_FLIGHT = 100
_ACTIVE_PERSONS = 1000

_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_CITIES = (
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne",
)  # fmt: skip
_FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
_LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_OTHER_CHANNELS = 10_000
_EMAIL_USERS, _EMAIL_HOSTS = 8192, 1024

_WORDS = 1 << 16
_WORD_LETTERS = 8
_POWER_BITS = 10


@dataclass(frozen=True, slots=True)
class Clock:
    """When events happen: number 0 at `start`, in microseconds since 1970, and `rate` of them in every second."""

    start: int
    rate: int

    def times(self, events: Integers) -> Integers:
        """When these events happen, in microseconds since 1970."""
        seconds = events // self.rate
        rest = events - seconds * self.rate
        times: Integers = self.start + seconds * 1_000_000 + rest * 1_000_000 // self.rate
        return times

    def events_until(self, now: int) -> int:
        """How many events have happened by then, that very microsecond included."""
        return max(0, ((now - self.start + 1) * self.rate - 1) // 1_000_000 + 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the three kinds of events: its place among every fifty, its schema and its columns."""

    first: int
    count: int
    schema: pa.Schema
    columns: Callable[[Integers, Clock], Columns]

    def rows_before(self, events: int) -> int:
        """How many of the first so many events are of this kind."""
        groups, rest = divmod(events, _GROUP)
        return groups * self.count + min(max(rest - self.first, 0), self.count)

    def batch(self, first: int, last: int, columns: Sequence[str], clock: Clock) -> pa.RecordBatch:
        """Make this kind's rows from number `first` up to but not including `last`."""
        groups, rest = np.divmod(np.arange(first, last, dtype=np.int64), self.count)
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.nulls(last - first, pa.struct([])))
        makers = self.columns(groups * _GROUP + self.first + rest, clock)
        schema = pa.schema([self.schema.field(name) for name in columns])
        return pa.RecordBatch.from_arrays([makers[name]() for name in columns], schema=schema)


def _person(events: Integers, clock: Clock) -> Columns:
    def pick(field: str, values: pa.Array) -> pa.Array:
        return values.take(pa.array(_below(_hash(events, f"person.{field}"), len(values))))

    def email_address() -> pa.Array:
        user = pick("email_user", _letter_strings("email_user", _EMAIL_USERS, 3, 6))
        host = pick("email_host", _letter_strings("email_host", _EMAIL_HOSTS, 3, 4))
        return pc.binary_join_element_wise(user, pc.binary_join_element_wise(host, "com", "."), "@")

    return {
        "id": lambda: pa.array(_FIRST_PERSON + events // _GROUP),
        "name": lambda: pick("name", pa.array([f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES])),
        "email_address": email_address,
        "credit_card": lambda: pc.binary_join_element_wise(
            *(pick(f"credit_card.{part}", _four_digits()) for part in range(4)), " "
        ),
        "city": lambda: pick("city", pa.array(_CITIES)),
        "state": lambda: pick("state", pa.array(_STATES)),
        "date_time": lambda: _times(clock.times(events)),
        "extra": lambda: _text(_hash(events, "person.extra"), 14, 20, _letters()),
    }


def _auction(events: Integers, clock: Clock) -> Columns:
    groups, place = np.divmod(events, _GROUP)

    def initial_bid() -> Integers:
        return _prices(_hash(events, "auction.initial_bid"))

    def seller() -> pa.Array:
        hot = groups // _HOT_EVERY * _HOT_EVERY
        is_hot = _below(_hash(events, "auction.is_hot"), _HOT_SELLERS) > 0
        return pa.array(_FIRST_PERSON + np.where(is_hot, hot, _active_person(groups, events, "auction.seller")))

    def expires() -> pa.Array:
        # On average, as many auctions are open as should be in flight.
        horizon = _AUCTIONS_IN_FLIGHT * _GROUP // _AUCTIONS_IN_GROUP * 1_000_000 // clock.rate
        length = 1 + _below(_hash(events, "auction.expires"), max(2 * horizon, 1))
        return _times(clock.times(events) + length)

    return {
        "id": lambda: pa.array(_FIRST_AUCTION + groups * _AUCTIONS_IN_GROUP + place - 1),
        "item_name": lambda: pc.ascii_trim_whitespace(_text(_hash(events, "auction.item_name"), 1, 2, _prose())),
        "description": lambda: pc.ascii_trim_whitespace(_text(_hash(events, "auction.description"), 1, 12, _prose())),
        "initial_bid": lambda: pa.array(initial_bid()),
        "reserve": lambda: pa.array(initial_bid() + _prices(_hash(events, "auction.reserve"))),
        "date_time": lambda: _times(clock.times(events)),
        "expires": expires,
        "seller": seller,
        "category": lambda: pa.array(_FIRST_CATEGORY + _below(_hash(events, "auction.category"), _CATEGORIES)),
        "extra": lambda: _text(_hash(events, "auction.extra"), 39, 58, _letters()),
    }


def _bid(events: Integers, clock: Clock) -> Columns:
    groups = events // _GROUP

    def auction() -> pa.Array:
        newest = groups * _AUCTIONS_IN_GROUP + _AUCTIONS_IN_GROUP - 1
        open_auctions = np.minimum(newest, _AUCTIONS_IN_FLIGHT) + 1
        hot = newest // _HOT_EVERY * _HOT_EVERY
        any_open = newest - _below(_hash(events, "bid.auction"), open_auctions)
        is_hot = _below(_hash(events, "bid.is_hot_auction"), _HOT_AUCTIONS) > 0
        return pa.array(_FIRST_AUCTION + np.where(is_hot, hot, any_open))

    def bidder() -> pa.Array:
        # The second of every hundred, so that hot bidders are not hot sellers; it may not exist yet.
        hot = np.minimum(groups // _HOT_EVERY * _HOT_EVERY + 1, groups)
        is_hot = _below(_hash(events, "bid.is_hot_bidder"), _HOT_BIDDERS) > 0
        return pa.array(_FIRST_PERSON + np.where(is_hot, hot, _active_person(groups, events, "bid.bidder")))

    def channel() -> pa.Array:
        hot = _below(_hash(events, "bid.hot_channel"), len(_CHANNELS))
        other = len(_CHANNELS) + _below(_hash(events, "bid.channel"), _OTHER_CHANNELS)
        is_hot = _below(_hash(events, "bid.is_hot_channel"), _HOT_CHANNELS) > 0
        return pa.array(np.where(is_hot, hot, other))

    return {
        "auction": auction,
        "bidder": bidder,
        "price": lambda: pa.array(_prices(_hash(events, "bid.price"))),
        "channel": lambda: _channels().take(channel()),
        "url": lambda: _urls().take(channel()),
        "date_time": lambda: _times(clock.times(events)),
        "extra": lambda: _text(_hash(events, "bid.extra"), 7, 10, _letters()),
    }


_PERSON = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("email_address", pa.string()),
        ("credit_card", pa.string()),
        ("city", pa.string()),
        ("state", pa.string()),
        ("date_time", TIME),
        ("extra", pa.string()),
    ]
)
_AUCTION = pa.schema(
    [
        ("id", pa.int64()),
        ("item_name", pa.string()),
        ("description", pa.string()),
        ("initial_bid", pa.int64()),
        ("reserve", pa.int64()),
        ("date_time", TIME),
        ("expires", TIME),
        ("seller", pa.int64()),
        ("category", pa.int64()),
        ("extra", pa.string()),
    ]
)
_BID = pa.schema(
    [
        ("auction", pa.int64()),
        ("bidder", pa.int64()),
        ("price", pa.int64()),
        ("channel", pa.string()),
        ("url", pa.string()),
        ("date_time", TIME),
        ("extra", pa.string()),
    ]
)

KINDS: Mapping[str, Kind] = {
    "person": Kind(0, 1, _PERSON, _person),
    "auction": Kind(1, _AUCTIONS_IN_GROUP, _AUCTION, _auction),
    "bid": Kind(1 + _AUCTIONS_IN_GROUP, _GROUP - 1 - _AUCTIONS_IN_GROUP, _BID, _bid),
}


def _hash(numbers: Integers, field: str) -> Hashes:
    """Hash numbers to 64 bits, each field in its own way (the finalizer of splitmix64)."""
    salt = int.from_bytes(blake2b(field.encode(), digest_size=8).digest(), "little")
    return _mixed(numbers.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt))


def _mixed(bits: Hashes) -> Hashes:
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def _below(hashes: Hashes, limits: int | Integers) -> Integers:
    """Spread hashes evenly over the numbers from 0 up to `limits`, which are below 2 to the power of 32."""
    scale = limits.view(np.uint64) if isinstance(limits, np.ndarray) else np.uint64(limits)
    return (((hashes >> np.uint64(32)) * scale) >> np.uint64(32)).view(np.int64)


def _active_person(groups: Integers, events: Integers, field: str) -> Integers:
    """One of the thousand newest persons."""
    return groups - _below(_hash(events, field), np.minimum(groups + 1, _ACTIVE_PERSONS))


def _times(micros: Integers) -> pa.Array:
    return pa.array(micros).view(TIME)


def _prices(hashes: Hashes) -> Integers:
    """From 1 to 1,000,000 in hundredths, as many from 1 to 10 as from 10 to 100 and so on."""
    coarse, fine = _powers_of_ten()
    mask = np.uint64((1 << _POWER_BITS) - 1)
    high = coarse[(hashes >> np.uint64(64 - _POWER_BITS)).view(np.int64)]
    low = fine[((hashes >> np.uint64(64 - 2 * _POWER_BITS)) & mask).view(np.int64)]
    return np.rint(high * low * 100.0).astype(np.int64)


@cache
def _powers_of_ten() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tables whose products are 10 to the power of 0 to 6: unlike `pow`, the same to the last bit on every machine."""
    steps = 1 << _POWER_BITS
    coarse = [float(Decimal(10) ** (Decimal(6 * step) / steps)) for step in range(steps)]
    fine = [float(Decimal(10) ** (Decimal(6 * step) / steps / steps)) for step in range(steps)]
    return np.array(coarse), np.array(fine)


def _text(hashes: Hashes, fewest: int, most: int, words: Hashes) -> pa.Array:
    """Text of `fewest` to `most` words of eight letters each, with nothing between them."""
    counts = fewest + _below(hashes, most - fewest + 1)
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)
    seeds = np.repeat(hashes, counts) + places.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    chosen = words[(_mixed(seeds) >> np.uint64(48)).view(np.int64)]
    offsets = np.zeros(len(counts) + 1, np.int32)
    offsets[1:] = ends * _WORD_LETTERS
    return pa.StringArray.from_buffers(len(counts), pa.py_buffer(offsets), pa.py_buffer(chosen))


def _random_bytes(field: str, count: int) -> NDArray[np.uint16]:
    return (
        _hash(np.arange(-(-count // 8), dtype=np.int64), field).astype("<u8").view(np.uint8)[:count].astype(np.uint16)
    )


@cache
def _letters() -> Hashes:
    """Words of eight random letters, each word in eight bytes."""
    letters = _random_bytes("letters", _WORDS * _WORD_LETTERS) * 26 // 256 + ord("a")
    return letters.astype(np.uint8).view(np.uint64)


@cache
def _prose() -> Hashes:
    """Words as `_letters` makes them, but a letter in thirteen is a space."""
    spaces = _random_bytes("spaces", _WORDS * _WORD_LETTERS) < 256 // 13
    return np.where(spaces, np.uint8(ord(" ")), _letters().view(np.uint8)).view(np.uint64)


@cache
def _letter_strings(field: str, count: int, shortest: int, longest: int) -> pa.Array:
    lengths = shortest + _below(_hash(np.arange(count, dtype=np.int64), f"{field}.length"), longest - shortest + 1)
    letters = bytes((_random_bytes(field, count * longest) * 26 // 256 + ord("a")).astype(np.uint8)).decode()
    return pa.array([letters[at * longest : at * longest + size] for at, size in enumerate(lengths.tolist())])


@cache
def _four_digits() -> pa.Array:
    return pa.array([f"{number:04}" for number in range(10_000)])


@cache
def _channels() -> pa.Array:
    return pa.array([*_CHANNELS, *(f"channel-{number}" for number in range(_OTHER_CHANNELS))])


@cache
def _urls() -> pa.Array:
    """Where each channel's items are. The well-known channels and one in ten of the others do without an id."""
    count = len(_CHANNELS) + _OTHER_CHANNELS
    folders = zip(*(_letter_strings(f"url.{part}", count, 3, 5).to_pylist() for part in range(3)), strict=True)
    with_id = _below(_hash(np.arange(count, dtype=np.int64), "url.with_id"), 10) > 0
    return pa.array(
        [
            f"https://www.nexmark.com/{'/'.join(names)}/item.htm?query=1"
            + (f"&channel_id={at - len(_CHANNELS)}" if with_id[at] and at >= len(_CHANNELS) else "")
            for at, names in enumerate(folders)
        ]
    )
