"""Hypothesis strategies for everything that the log can hold."""

from datetime import UTC
from typing import get_args

import pendulum
from hypothesis import strategies as st
from pendulum import DateTime

from arroyo_dagster.log.entries import Entry, Fact
from arroyo_dagster.model import CheckpointBarrier, EpochSet, JsonValue, ObjectPath, SourceRange

times: st.SearchStrategy[DateTime] = st.datetimes(
    min_value=pendulum.naive(1900, 1, 1),
    max_value=pendulum.naive(2200, 1, 1),
    timezones=st.just(UTC),
).map(lambda moment: pendulum.instance(moment).in_timezone("UTC"))
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
epoch_sets = st.frozensets(st.integers(1, 60)).map(EpochSet.of)
paths = st.lists(st.from_regex(r"[a-zA-Z0-9 %=_-]{1,8}", fullmatch=True), min_size=1, max_size=4).map(
    lambda segments: ObjectPath("/".join(segments))
)
barriers = st.tuples(st.integers(1, 10**12), st.integers(0, 10**12), times, st.booleans()).map(
    lambda parts: (
        CheckpointBarrier(max(parts[:2]), min(parts[:2]), parts[2], parts[3])
        if max(parts[:2]) >= 1
        else CheckpointBarrier(1, 0, parts[2], parts[3])
    )
)

for kind, strategy in (
    (DateTime, times),
    (SourceRange, st.builds(SourceRange, json_values, json_values, st.booleans())),
    (EpochSet, epoch_sets),
    (ObjectPath, paths),
    (CheckpointBarrier, barriers),
):
    st.register_type_strategy(kind, strategy)

facts: st.SearchStrategy[Fact] = st.one_of(*(st.from_type(kind) for kind in get_args(Fact)))
entries = st.builds(Entry, sequence=st.integers(1, 10**15), writer=st.text(), timestamp=times, fact=facts)
