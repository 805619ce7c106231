"""Nexmark's events: what they hold, when they come, and that nothing depends on how they are read."""

import json
import pickle
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pendulum
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster.dataflow.source import Offsets, ReadReport, Split
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.model import JsonValue
from arroyo_dagster.sources import NexmarkSource
from arroyo_dagster.sources.nexmark_events import KINDS, Clock

START = pendulum.datetime(2025, 1, 1)
START_MICROS = 1_735_689_600_000_000
LATER = pendulum.datetime(2026, 1, 1)
NAMES = ["person", "auction", "bid"]


def source(kind: str, **options: Any) -> NexmarkSource:
    return NexmarkSource(kind, **{"start": START, **options})  # type: ignore[arg-type]


def offset(events: int) -> JsonValue:
    return {"start": START_MICROS, "events": events}


def rows(kind: str, low: int, high: int, columns: list[str] | None = None, events_per_second: int = 10_000) -> pa.Table:
    made = source(kind, events_per_second=events_per_second)
    splits = made.splits(offset(low) if low else None, offset(high))
    batches = [batch for split in splits for batch in made.read(split, columns, ReadReport())]
    return pa.Table.from_batches(batches, None if batches else made.schema)


def numbers(table: pa.Table, column: str) -> Any:
    return table.column(column).to_numpy()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("person", "id name email_address credit_card city state date_time extra"),
        ("auction", "id item_name description initial_bid reserve date_time expires seller category extra"),
        ("bid", "auction bidder price channel url date_time extra"),
    ],
)
def test_the_rows_have_the_schema(kind: str, names: str) -> None:
    made = source(kind)
    assert made.schema.names == names.split()
    assert made.schema.field("date_time").type == pa.timestamp("us", "UTC")
    assert made.schema_at(None) == made.schema
    table = rows(kind, 0, 100)
    assert table.schema == made.schema
    table.validate(full=True)
    assert all(column.null_count == 0 for column in table.columns)


def test_of_every_fifty_events_one_is_a_person_three_are_auctions_and_the_rest_are_bids() -> None:
    assert [rows(kind, 0, 50_000).num_rows for kind in NAMES] == [1_000, 3_000, 46_000]
    steps = np.arange(50)
    times = {kind: numbers(rows(kind, 50, 100), "date_time").astype(np.int64) for kind in NAMES}
    expected = START_MICROS + (50 + steps) * 100
    assert np.array_equal(np.concatenate([times[kind] for kind in NAMES]), expected)


def test_ids_count_up_from_a_thousand() -> None:
    assert np.array_equal(numbers(rows("person", 0, 5_000), "id"), np.arange(1000, 1100))
    assert np.array_equal(numbers(rows("auction", 0, 5_000), "id"), np.arange(1000, 1300))


@pytest.mark.parametrize("low", [0, 1_234_500])
def test_whoever_is_referred_to_came_before(low: int) -> None:
    columns = ["auction", "bidder", "date_time"]
    bids, auctions = rows("bid", low, low + 100_000, columns), rows("auction", low, low + 100_000)
    persons_then = 1000 + np.arange(low // 50, low // 50 + 2_000)
    newest_person = np.repeat(persons_then, 46)
    newest_auction = np.repeat(1000 + 3 * (persons_then - 1000) + 2, 46)
    assert (numbers(bids, "auction") <= newest_auction).all()
    assert (numbers(bids, "auction") >= np.maximum(newest_auction - 100, 1000)).all()
    assert (numbers(bids, "bidder") <= newest_person).all()
    assert (numbers(bids, "bidder") >= np.maximum(newest_person - 1_000, 1000)).all()
    assert (numbers(auctions, "seller") <= np.repeat(persons_then, 3)).all()
    assert (numbers(auctions, "seller") >= np.repeat(np.maximum(persons_then - 1_000, 1000), 3)).all()


def test_some_are_hot() -> None:
    bids, auctions = rows("bid", 1_000_000, 1_100_000), rows("auction", 1_000_000, 1_100_000)
    channels = bids.column("channel").to_pylist()
    assert np.mean(numbers(bids, "auction") % 100 == 0) == pytest.approx(0.5, abs=0.02)
    assert np.mean(numbers(bids, "bidder") % 100 == 1) == pytest.approx(0.75, abs=0.02)
    assert np.mean(numbers(auctions, "seller") % 100 == 0) == pytest.approx(0.75, abs=0.03)
    assert np.mean([name in {"Google", "Facebook", "Baidu", "Apple"} for name in channels]) == pytest.approx(
        0.5, abs=0.02
    )


def test_values_are_spread_as_the_benchmark_wants_it() -> None:
    bids, auctions, persons = (rows(kind, 0, 200_000) for kind in ("bid", "auction", "person"))
    prices = numbers(bids, "price")
    assert 100 <= prices.min() < 110
    assert 90_000_000 < prices.max() <= 100_000_000
    assert np.median(prices) == pytest.approx(100_000, rel=0.05)  # as many below 10^3 as above
    assert set(numbers(auctions, "category")) == {10, 11, 12, 13, 14}
    assert (numbers(auctions, "reserve") > numbers(auctions, "initial_bid")).all()
    open_for = numbers(auctions, "expires").astype(np.int64) - numbers(auctions, "date_time").astype(np.int64)
    assert open_for.min() >= 1
    assert open_for.mean() == pytest.approx(166_600, rel=0.02)
    assert len(set(persons.column("city").to_pylist())) == 10
    assert set(persons.column("state").to_pylist()) == {"AZ", "CA", "ID", "OR", "WA", "WY"}
    assert all(text.count(" ") == 3 and len(text) == 19 for text in persons.column("credit_card").to_pylist())
    for table, size in ((bids, 68), (auctions, 388), (persons, 136)):
        assert np.mean([len(text) for text in table.column("extra").to_pylist()]) == pytest.approx(size, rel=0.02)


def test_fields_are_not_tied_to_each_other() -> None:
    bids = rows("bid", 1_000_000, 1_200_000, ["auction", "bidder", "price"])
    hot = (numbers(bids, "auction") % 100 == 0).astype(float)
    columns = [hot, (numbers(bids, "bidder") % 100 == 1).astype(float), np.log(numbers(bids, "price"))]
    assert np.abs(np.corrcoef(columns) - np.eye(3)).max() < 0.01


@pytest.mark.parametrize("kind", NAMES)
def test_concrete_rows_stay_what_they_are(kind: str) -> None:
    [row] = rows(kind, 1_000_000, 1_000_050).slice(0, 1).to_pylist()
    row["extra"] = row["extra"][:16]
    assert {name: str(value) if "time" in name or name == "expires" else value for name, value in row.items()} == ROWS[
        kind
    ]
    text = json.dumps(rows(kind, 1_000_000, 1_010_000).to_pylist(), default=str)
    assert blake2b(text.encode(), digest_size=8).hexdigest() == DIGESTS[kind]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 10**12),
    st.lists(st.integers(0, 400), min_size=1, max_size=5),
)
def test_any_cut_gives_the_same_rows(kind: str, low: int, lengths: list[int]) -> None:
    cuts = np.cumsum([low, *lengths]).tolist()
    parts = [rows(kind, first, last) for first, last in pairwise(cuts)]
    assert pa.concat_tables(parts).equals(rows(kind, low, cuts[-1]))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(NAMES))
def test_columns_are_the_same_alone_and_together(data: st.DataObject, kind: str) -> None:
    names = data.draw(st.lists(st.sampled_from(KINDS[kind].schema.names), unique=True))
    table = rows(kind, 10_000, 10_200, names)
    assert table.num_rows == rows(kind, 10_000, 10_200).num_rows
    assert table.equals(rows(kind, 10_000, 10_200).select(names))


def test_long_ranges_are_cut_into_splits_and_batches() -> None:
    made = source("bid")
    splits = made.splits(None, offset(600_001))
    assert [split.weight for split in splits] == [230_000, 230_000, 92_000]
    batches = [list(made.read(split, ["price"], ReadReport())) for split in splits]
    assert [[batch.num_rows for batch in part] for part in batches] == [[131_072, 98_928], [131_072, 98_928], [92_000]]


def test_a_range_with_none_of_the_kind_has_no_splits() -> None:
    assert source("person").splits(offset(1), offset(50)) == []
    assert source("auction").splits(offset(4), offset(51)) == []
    assert source("bid").splits(offset(50), offset(54)) == []
    assert source("bid").splits(None, None) == []
    assert source("bid").splits(offset(70), offset(70)) == []


@settings(deadline=None)
@given(st.integers(1, 3_000_000), st.integers(0, 10**7))
def test_an_event_is_there_from_its_own_microsecond_on(rate: int, event: int) -> None:
    clock = Clock(START_MICROS, rate)
    [time] = clock.times(np.array([event])).tolist()
    assert clock.events_until(time - 1) <= event < clock.events_until(time)
    assert time == START_MICROS + event * 1_000_000 // rate


def test_events_are_released_as_their_time_comes() -> None:
    made = source("bid", events_per_second=100)
    assert made.latest(None, START.subtract(microseconds=1)) == Offsets(None)
    first = made.latest(None, START)
    assert first == Offsets(offset(1))
    second = made.latest(first.end, START.add(seconds=2))
    assert second == Offsets(offset(201))
    assert made.latest(second.end, START.add(seconds=2)) == Offsets(second.end)
    assert made.latest(second.end, START) == Offsets(second.end)  # a clock that was set back


def test_without_a_start_the_first_epoch_sets_one_a_minute_ago() -> None:
    made = NexmarkSource("bid", events_per_second=10)
    now = START.add(seconds=90, microseconds=700_000)
    first = made.latest(None, now)
    assert first == Offsets({"start": START_MICROS + 30_000_000, "events": 608})
    assert made.latest(first.end, now.add(minutes=1)) == Offsets({"start": START_MICROS + 30_000_000, "events": 1208})


def test_limits_cut_and_tell_of_a_backlog() -> None:
    made = source("bid", events=1_000, max_events_per_epoch=400)
    ends = [made.latest(None, LATER)]
    while ends[-1].backlog:
        ends.append(made.latest(ends[-1].end, LATER))
    assert ends == [Offsets(offset(400), True), Offsets(offset(800), True), Offsets(offset(1_000))]
    assert made.latest(ends[-1].end, LATER) == Offsets(ends[-1].end)
    assert source("bid", events=0).latest(None, LATER) == Offsets(None)


@pytest.mark.parametrize("start", ["2025-01-01", "2025-01-01T00:00:00Z", "2025-01-01T02:00:00+02:00", START])
def test_a_start_can_be_written_in_many_ways(start: Any) -> None:
    assert source("bid", start=start, events=1).latest(None, LATER) == Offsets(offset(1))


def test_a_start_is_kept_to_the_microsecond() -> None:
    made = source("bid", start="2025-01-01T00:00:00.000007Z", events=1)
    assert made.latest(None, LATER) == Offsets({"start": START_MICROS + 7, "events": 1})


def test_a_source_is_pickled_to_the_tasks() -> None:
    made: NexmarkSource = pickle.loads(pickle.dumps(source("bid")))  # noqa: S301
    [split] = made.splits(None, offset(100))
    assert sum(batch.num_rows for batch in made.read(split, None, ReadReport())) == 92


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "seller"}, "no events of kind 'seller': take one of person, auction, bid"),
        ({"events_per_second": 0}, "events_per_second of a Nexmark source must be a whole number from 1 on, not 0"),
        ({"events_per_second": 0.5}, "events_per_second .* not 0.5"),
        ({"events": -1}, "events .* from 0 on, not -1"),
        ({"max_events_per_epoch": 0}, "max_events_per_epoch .* from 1 on, not 0"),
        ({"start": "yesterday"}, "start of a Nexmark source must be a time with its zone, .* not 'yesterday'"),
        ({"start": "P3D"}, "start .* not 'P3D'"),
        ({"start": pendulum.naive(2025, 1, 1)}, "start .* with its zone"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        source(**{"kind": "bid", **options})


def test_what_is_not_its_own_is_refused() -> None:
    made = source("bid")
    with pytest.raises(ConfigurationError, match="is not an offset of a Nexmark source"):
        made.latest({"version": 1}, LATER)
    with pytest.raises(ConfigurationError, match="is not a split of a Nexmark source"):
        list(made.read(Split({"path": "x"}), None, ReadReport()))
    [split] = made.splits(None, offset(100))
    with pytest.raises(ConfigurationError, match="bid events have no column 'seller': there are auction, bidder"):
        list(made.read(split, ["price", "seller"], ReadReport()))


ROWS: dict[str, dict[str, Any]] = {
    "person": {
        "id": 21000,
        "name": "Walter Abrams",
        "email_address": "xganq@ttm.com",
        "credit_card": "7585 7412 5255 3243",
        "city": "Phoenix",
        "state": "CA",
        "date_time": "2025-01-01 00:01:40+00:00",
        "extra": "fsucvipkjmzakpqq",
    },
    "auction": {
        "id": 61000,
        "item_name": "itnih mbxq bgkqs",
        "description": "syzdanqe zhjfvasnq qbhndxklzyi h",
        "initial_bid": 18644131,
        "reserve": 18645245,
        "date_time": "2025-01-01 00:01:40.000100+00:00",
        "expires": "2025-01-01 00:01:40.205067+00:00",
        "seller": 21000,
        "category": 11,
        "extra": "ylddstrbdodttdpp",
    },
    "bid": {
        "auction": 60970,
        "bidder": 20632,
        "price": 168,
        "channel": "channel-9611",
        "url": "https://www.nexmark.com/tqj/bvgrd/qjeui/item.htm?query=1&channel_id=9611",
        "date_time": "2025-01-01 00:01:40.000400+00:00",
        "extra": "efxcbyllmfpbgxoe",
    },
}
DIGESTS = {"person": "567ca6a30964062d", "auction": "23a2bd8c9a2673c2", "bid": "5d2bb390af90c217"}
