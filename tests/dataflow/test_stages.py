"""How a dataflow is cut into stages."""

import pyarrow as pa

from arroyo_dagster import Pipeline
from arroyo_dagster.dataflow import GlobalTable, agg
from arroyo_dagster.dataflow.graph import MapBatches, Select, Where
from arroyo_dagster.dataflow.stages import Leg, Outlet, Stage, cut
from arroyo_dagster.dataflow.stream import Stream
from tests.dataflow.helpers import BIDS, Nowhere, With, bids


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


SAME = MapBatches(same, None)


def counted(stream: Stream, name: str = "stats", late: bool = False) -> Stream:
    windows = stream.key_by("auction").tumble("10 seconds")
    return windows.aggregate(name, late_to=Nowhere() if late else None, n=agg.count(), top=agg.max("price"))


def stages(stream: Stream) -> tuple[Stage, ...]:
    return cut(stream.pipeline.graph())


def test_a_source_that_leads_straight_to_a_sink_is_one_stage_without_an_operator() -> None:
    [stage] = stages(bids().where("price > 1").sink("out", Nowhere()))
    assert stage == Stage(
        "out", (Leg(0, "bids", True, (Where("price > 1"),), None),), None, (Outlet("out", ()),), exchanged=False
    )


def test_a_sink_takes_an_operators_rows_where_they_arise() -> None:
    [stage] = stages(counted(bids()).sink("out", Nowhere()))
    assert (stage.name, stage.outlets, stage.exchanged) == ("stats", (Outlet("out", ()),), False)
    assert stage.operator is not None
    assert stage.operator.name == "stats"


def test_functions_on_batches_do_not_ask_for_another_stage_but_spark_does() -> None:
    result = counted(bids())
    result.map_batches(same).map_batches(same).sink("mapped", Nowhere())
    first, second = stages(result.map_batches(same).where("n > 1").sink("filtered", Nowhere()))
    assert first.outlets == (Outlet("mapped", (SAME, SAME)),)
    assert first.exchanged
    assert second == Stage(
        "filtered",
        (Leg(0, "stats", False, (SAME, Where("n > 1")), None),),
        None,
        (Outlet("filtered", ()),),
        exchanged=False,
    )


def test_a_stream_with_many_readers_is_left_for_all_of_them() -> None:
    result = counted(bids())
    result.sink("one", Nowhere()).sink("two", Nowhere())
    result.key_by("auction").process("totals", With()).sink("three", Nowhere())
    first, second = stages(result)
    assert first.outlets == (Outlet("one", ()), Outlet("two", ()))
    assert first.exchanged
    assert [leg.origin for leg in second.legs] == ["stats"]
    assert not second.exchanged


def test_a_source_with_many_readers_is_read_by_each_with_its_own_steps() -> None:
    source = bids()
    source.select("price").sink("prices", Nowhere())
    counted(source.where("price > 1")).sink("out", Nowhere())
    first, second = stages(source)
    assert [(stage.name, stage.legs[0].origin, stage.legs[0].steps) for stage in (first, second)] == [
        ("stats", "bids", (Where("price > 1"),)),
        ("prices", "bids", (Select(("price",)),)),
    ]


def test_a_union_is_several_legs_to_one_input() -> None:
    pipeline = Pipeline("auctions")
    one, two = bids(pipeline, "one"), bids(pipeline, "two")
    [stage] = stages(counted(one.where("price > 1").union(two).map_batches(same)).sink("out", Nowhere()))
    assert [(leg.input, leg.origin, leg.steps) for leg in stage.legs] == [
        (0, "one", (Where("price > 1"), SAME)),
        (0, "two", (SAME,)),
    ]


def test_a_union_of_operators_before_a_sink_is_a_stage_of_its_own() -> None:
    source = bids()
    one, two = counted(source, "one"), counted(source, "two")
    *operators, last = stages(one.union(two).sink("out", Nowhere()))
    assert [(stage.name, stage.outlets, stage.exchanged) for stage in operators] == [
        ("one", (), True),
        ("two", (), True),
    ]
    assert (last.name, last.operator, [leg.origin for leg in last.legs]) == ("out", None, ["one", "two"])


def test_two_inputs_are_legs_to_two_inputs() -> None:
    pipeline = Pipeline("auctions")
    one, two, three = (bids(pipeline, name) for name in ("one", "two", "three"))
    joined = one.key_by("auction").process("joined", With(), two.union(three).key_by("auction"))
    [stage] = stages(joined.sink("out", Nowhere()))
    assert [(leg.input, leg.origin) for leg in stage.legs] == [(0, "one"), (1, "two"), (1, "three")]


def test_each_stage_stands_behind_those_that_it_reads_from() -> None:
    source = bids()
    first = counted(source, "first")
    first.where("n > 1").sink("filtered", Nowhere())
    second = first.key_by("auction").tumble("1 minute").aggregate("second", n=agg.sum("n"))
    second.process("third", With(GlobalTable("t", BIDS, ("auction",)))).sink("out", Nowhere())
    done = set[str]()
    for stage in stages(source):
        assert {leg.origin for leg in stage.legs if not leg.from_source} <= done
        done.add(stage.name)
    assert done == {"first", "second", "third", "filtered"}


class TestColumns:
    """Only the columns that a window needs are read, where nothing else looks at the rows."""

    def columns(self, stream: Stream) -> list[tuple[str, ...] | None]:
        return [leg.columns for stage in stages(stream) for leg in stage.legs]

    def test_a_window_right_behind_a_source(self) -> None:
        assert self.columns(counted(bids()).sink("out", Nowhere())) == [("auction", "at", "price")]

    def test_a_window_behind_a_window(self) -> None:
        wide = counted(bids()).key_by("auction").tumble("1 minute").aggregate("wide", n=agg.sum("n"), m=agg.max("n"))
        assert self.columns(wide.sink("out", Nowhere())) == [("auction", "at", "price"), ("auction", "window_end", "n")]

    def test_steps_operators_sinks_and_late_rows_need_all(self) -> None:
        source = bids()
        counted(source.where("name = 'x'"), "a").sink("a_out", Nowhere())
        counted(source, "b", late=True).sink("b_out", Nowhere())
        source.key_by("auction").process("c", With()).sink("c_out", Nowhere())
        source.sink("d_out", Nowhere())
        assert self.columns(source) == [None] * 4

    def test_the_sources_own_event_time_is_read_too(self) -> None:
        schema = pa.schema([("auction", pa.int64()), ("price", pa.int64()), ("at", pa.timestamp("us"))])
        moved = bids().map_batches(same, schema)
        assert self.columns(counted(moved).sink("out", Nowhere())) == [None]


def test_late_rows_go_to_a_sink_that_is_no_stage() -> None:
    stream = counted(bids(), late=True).sink("out", Nowhere())
    [stage] = stages(stream)
    assert stage.operator is not None
    assert stage.operator.late_to == "stats_late"
    assert stream.pipeline.graph().sink("stats_late").stream is None
