"""Pipelines: what they are made of, and what is wrong with them is said when they are defined."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pendulum
import pyarrow as pa
import pytest

from arroyo_dagster import Pipeline, Retention
from arroyo_dagster.controller import CheckpointPolicy
from arroyo_dagster.dataflow import agg
from arroyo_dagster.dataflow.graph import EventTime
from arroyo_dagster.errors import ConfigurationError
from tests.dataflow.helpers import BIDS, Nowhere, Rows, With, bids


class TestPipeline:
    def test_has_a_policy_and_a_retention(self) -> None:
        pipeline = Pipeline("auctions")
        assert (pipeline.policy, pipeline.retention, pipeline.key_groups) == (CheckpointPolicy(), Retention(20), 128)

    def test_an_interval_is_short_for_a_policy(self) -> None:
        policy = CheckpointPolicy(timeout=pendulum.duration(hours=3))
        pipeline = Pipeline("auctions", checkpoint_interval="90 seconds", policy=policy)
        assert pipeline.policy.interval == timedelta(seconds=90)
        assert pipeline.policy.timeout == timedelta(hours=3)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"name": ""}, "the pipeline name '' is not usable"),
            ({"name": "1st"}, "the pipeline name '1st' is not usable"),
            ({"name": "a/b"}, "the pipeline name 'a/b' is not usable"),
            ({"name": "ä"}, "the pipeline name 'ä' is not usable"),
            ({"name": "a" * 101}, "is not usable"),
            ({"name": 5}, "the name of a pipeline must be a text, not 5"),
            ({"checkpoint_interval": "soon"}, "'auctions': its checkpoint_interval must be a duration .*, not 'soon'"),
            ({"checkpoint_interval": 30}, "'auctions': its checkpoint_interval must be a duration .*, not 30"),
            ({"checkpoint_interval": "0 seconds"}, "interval must be .*, not 0 seconds"),
            ({"checkpoint_interval": timedelta(seconds=-1)}, "interval must be .*, not -1 seconds"),
            ({"parallelism": 0}, "'auctions': its parallelism must lie between 1 and its 128 key groups, not at 0"),
            ({"parallelism": 129}, "not at 129"),
            ({"parallelism": "2"}, "not at 2"),
            ({"parallelism": 3, "key_groups": 2}, "between 1 and its 2 key groups, not at 3"),
            ({"key_groups": 0}, "'auctions': its key_groups must lie between 1 and 65536, not at 0"),
            ({"key_groups": 65537}, "not at 65537"),
        ],
    )
    def test_refuses(self, arguments: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            Pipeline(**{"name": "auctions", **arguments})


class TestSource:
    def test_starts_a_stream_with_its_columns_and_event_time(self) -> None:
        stream = Pipeline("auctions").source(
            "bids", Rows(), event_time="at", watermark_delay="5 seconds", idle_after=timedelta(minutes=2)
        )
        assert stream.fields == dict(zip(BIDS.names, BIDS.types, strict=True))
        assert stream.event_time == EventTime("at")
        stream.sink("out", Nowhere())
        [node] = stream.pipeline.graph().sources
        assert (node.name, node.delay, node.idle_after) == ("bids", 5_000_000, 120_000_000)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ({"name": "a b"}, "pipeline 'auctions': the source name 'a b' is not usable"),
            ({"name": None}, "pipeline 'auctions': the source name None is not usable"),
            ({"source": "bids.parquet"}, "source 'bids' must be a Source such as FileSource, not 'bids.parquet'"),
            ({"source": Rows}, "source 'bids' must be a Source such as FileSource, not <class"),
            (
                {"event_time": "when"},
                "source 'bids': there is no column 'when' for event time; there are auction, price",
            ),
            ({"event_time": "auction"}, "source 'bids': the event time 'auction' is int64; make it a timestamp"),
            ({"watermark_delay": "late"}, "source 'bids': its watermark_delay must be a duration"),
            ({"idle_after": 5}, "source 'bids': its idle_after must be a duration"),
            ({"watermark_delay": timedelta(-1)}, "source 'bids': its watermark_delay and idle_after must be zero or"),
            ({"idle_after": timedelta(-1)}, "source 'bids': its watermark_delay and idle_after must be zero or"),
        ],
    )
    def test_refuses(self, arguments: dict[str, Any], complaint: str) -> None:
        pipeline = Pipeline("auctions")
        with pytest.raises(ConfigurationError, match=complaint):
            pipeline.source(**{"name": "bids", "source": Rows(), **arguments})

    def test_an_unknown_schema_is_taken_at_its_word(self) -> None:
        stream = Pipeline("auctions").source("bids", Rows(None), event_time="whenever")
        assert (stream.fields, stream.event_time) == (None, EventTime("whenever"))


class TestNames:
    def test_are_taken_once_whatever_has_them(self) -> None:
        stream = bids()
        with pytest.raises(ConfigurationError, match="'auctions': the name 'bids' is taken; give the source another"):
            stream.pipeline.source("bids", Rows())
        with pytest.raises(ConfigurationError, match="the name 'bids' is taken; give the sink another"):
            stream.sink("bids", Nowhere())
        with pytest.raises(ConfigurationError, match="the name 'bids' is taken; give the operator another"):
            stream.process("bids", With())
        windows = stream.key_by("auction").tumble("1 s")
        windows.aggregate("stats", late_to=Nowhere(), n=agg.count())
        with pytest.raises(ConfigurationError, match="the name 'stats_late' is taken; give the sink another"):
            stream.sink("stats_late", Nowhere())
        stream.sink("more_late", Nowhere())
        with pytest.raises(ConfigurationError, match="the name 'more_late' is taken; give the sink another"):
            windows.aggregate("more", late_to=Nowhere(), n=agg.count())

    @pytest.mark.parametrize("name", ["", "_x", "9", "a-b", "a.b", "x" * 101, None, 7], ids=repr)
    def test_must_do_for_files_and_dagster(self, name: Any) -> None:
        stream = bids()
        declarations: list[tuple[str, Callable[[], object]]] = [
            ("source", lambda: stream.pipeline.source(name, Rows())),
            ("sink", lambda: stream.sink(name, Nowhere())),
            ("operator", lambda: stream.process(name, With())),
            ("operator", lambda: stream.key_by("auction").tumble("1 s").aggregate(name, n=agg.count())),
        ]
        for kind, declare in declarations:
            with pytest.raises(ConfigurationError, match=f"'auctions': the {kind} name .* is not usable"):
                declare()

    @pytest.mark.parametrize("sink", [None, "out.parquet", Nowhere], ids=repr)
    def test_a_sink_must_be_one(self, sink: Any) -> None:
        with pytest.raises(ConfigurationError, match="sink 'out' must be a Sink such as DeltaSink, not "):
            bids().sink("out", sink)


class TestGraph:
    def test_a_pipeline_without_a_source(self) -> None:
        with pytest.raises(ConfigurationError, match="pipeline 'auctions' has no source"):
            Pipeline("auctions").graph()

    def test_a_source_that_leads_nowhere(self) -> None:
        stream = bids()
        bids(stream.pipeline, "unused").where("price > 1")
        stream.sink("out", Nowhere())
        with pytest.raises(ConfigurationError, match="pipeline 'auctions': the source 'unused' leads nowhere"):
            stream.pipeline.graph()

    @pytest.mark.parametrize("late", [None, Nowhere()], ids=["plain", "with late rows"])
    def test_an_operator_that_leads_nowhere(self, late: Nowhere | None) -> None:
        stream = bids().sink("out", Nowhere())
        stream.key_by("auction").tumble("1 s").aggregate("stats", late_to=late, n=agg.count())
        with pytest.raises(ConfigurationError, match="pipeline 'auctions': the operator 'stats' leads nowhere; give"):
            stream.pipeline.graph()

    def test_everything_in_the_order_of_its_declaration(self) -> None:
        stream = bids()
        result = stream.key_by("auction").tumble("1 s").aggregate("stats", late_to=Nowhere(), n=agg.count())
        result.sink("out", Nowhere())
        graph = stream.pipeline.graph()
        assert [node.name for node in graph.sources] == ["bids"]
        assert [node.name for node in graph.operators] == ["stats"]
        assert [node.name for node in graph.sinks] == ["stats_late", "out"]
        assert graph.source("bids") is graph.sources[0]
        assert graph.source("stats") is None
        assert graph.operators[0].keyed


def test_the_example_of_the_documentation_is_right() -> None:
    auctions = Pipeline("auctions", checkpoint_interval="30 seconds", retention=Retention(keep_last=20))
    source = auctions.source("bids", Rows(), event_time="at", watermark_delay="5 seconds")
    hot = (
        source.where("price > 100")
        .key_by("auction")
        .tumble("10 seconds")
        .aggregate("bid_stats", bids=agg.count(), top_price=agg.max("price"))
        .sink("hot_auctions", Nowhere())
    )
    time = pa.timestamp("us", "UTC")
    assert hot.fields == {
        "auction": pa.int64(),
        "window_start": time,
        "window_end": time,
        "bids": pa.int64(),
        "top_price": pa.decimal128(10, 2),
    }
    assert len(auctions.graph().operators) == 1
