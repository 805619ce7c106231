"""The union of all epochs' output is what DuckDB makes of the raw rows, however the input is cut into epochs."""

import datetime as dt
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.oracle import epochs_of, published, take_epochs, windows

START = 1_700_000_000
AGGREGATES = {
    "n": agg.count(),
    "seen": agg.count("v"),
    "total": agg.sum("v"),
    "least": agg.min("v"),
    "top": agg.max("v"),
    "average": agg.mean("v"),
    "spread": agg.stddev("v"),
    "kinds": agg.count_distinct("v"),
}
ANY_TYPE = {name: AGGREGATES[name] for name in ("n", "seen", "least", "top", "kinds")}

KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "integers": (pa.int64(), st.integers(-3, 3)),
    "small integers": (pa.int16(), st.integers(-3, 3)),
    "texts": (pa.string(), st.sampled_from(["", "a", "ä", "zebra", "a much longer key than the others"])),
    "dates": (pa.date32(), st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 4))),
    "decimals": (pa.decimal128(10, 2), st.decimals(0, 2, places=2)),
    "booleans": (pa.bool_(), st.booleans()),
}
VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any], Any]] = {
    "integers": (pa.int64(), st.integers(-1000, 1000), AGGREGATES),
    "bytes": (pa.int8(), st.integers(-128, 127), AGGREGATES),
    "floats": (pa.float64(), st.floats(-1e6, 1e6).map(lambda value: round(value, 3) + 0.0), AGGREGATES),
    "decimals": (pa.decimal128(12, 3), st.decimals(-1000, 1000, places=3), AGGREGATES),
    "texts": (pa.string(), st.text("abcäöü", max_size=3), ANY_TYPE),
    "dates": (pa.date32(), st.dates(dt.date(2020, 1, 1), dt.date(2020, 1, 9)), ANY_TYPE),
    "times": (
        pa.timestamp("us", "Europe/Berlin"),
        st.datetimes(dt.datetime(2020, 3, 28), dt.datetime(2020, 3, 30), timezones=st.just(dt.UTC)),  # noqa: DTZ001
        ANY_TYPE,
    ),
}


@st.composite
def inputs(draw: st.DrawFn, key: str, value: str) -> tuple[pa.Table, list[int]]:
    """Rows in a roughly rising order of time, with some far behind, some without time, key or value; and cuts."""
    key_type, keys = KEYS[key]
    value_type, values, _ = VALUES[value]
    steps = draw(st.lists(st.integers(0, 8), min_size=1, max_size=60))
    times, now = [], 0
    for step in steps:
        now += step
        back = draw(st.sampled_from([0, 0, 0, 3, 7, 25, 80]))
        times.append(draw(st.sampled_from([now - back, now - back, now - back, now - back, None])))
    rows = len(times)
    zone = draw(st.sampled_from([None, "UTC", "Asia/Kathmandu"]))
    table = pa.table(
        {
            "k": pa.array(draw(st.lists(st.none() | keys, min_size=rows, max_size=rows)), key_type),
            "v": pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), value_type),
            "t": pa.array([None if time is None else (START + time) * 1_000_000 for time in times], pa.int64()).cast(
                pa.timestamp("us", zone)
            ),
        }
    )
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=5)))
    return table, [*cuts, rows]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", ["integers", "texts"])
def test_windows_over_every_type(key: str, value: str) -> None:
    check_windows(key, value, examples=8)


@pytest.mark.parametrize("key", sorted(KEYS.keys() - {"integers", "texts"}))
def test_windows_by_every_type_of_key(key: str) -> None:
    check_windows(key, "integers", examples=8)


def check_windows(key: str, value: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(inputs(key, value), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 3]))
    def check(given_input: tuple[pa.Table, list[int]], parallelism: int, splits: int) -> None:
        rows, cuts = given_input
        aggregates = VALUES[value][2]
        with tempfile.TemporaryDirectory() as directory:
            pipeline = Pipeline("p", state_url=f"{directory}/state", parallelism=parallelism)
            (
                pipeline.source("rows", TableSource(rows, cuts, splits), event_time="t", watermark_delay="5 seconds")
                .key_by("k")
                .tumble("10 seconds")
                .aggregate("stats", late_to=ParquetSink(f"{directory}/late"), **aggregates)
                .sink("out", ParquetSink(f"{directory}/out"))
            )
            engine = InProcessEngine(pipeline)
            taken = take_epochs(engine, len(cuts) + 1)
            numbered = epochs_of(rows, cuts)
            question: dict[str, Any] = {
                "epochs": len(cuts) + 1, "keys": ["k"], "time": "t", "size": 10, "delay": 5, "aggregates": aggregates
            }  # fmt: skip
            assert published(Path(directory, "out"), ["k"], list(aggregates)) == windows(numbered, **question)
            late = sum(epoch.manifest.operators[0].late_rows for epoch in taken)
            assert [(late,)] == windows(numbered, **question, late=True)
            assert late == sum(output.files[0].rows if output.files else 0 for output in late_outputs(engine))
            assert engine.verify() == []

    check()


def late_outputs(engine: InProcessEngine) -> list[Any]:
    state = engine.state()
    outputs = [output for epoch in state.kept for output in engine.manifest(epoch, state).staged]
    return [
        type(output)(output.sink, (file,)) for output in outputs if output.sink == "stats_late" for file in output.files
    ]
