"""Streams: what is known of their columns, and what is refused."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from arroyo_dagster import Pipeline
from arroyo_dagster.dataflow import GlobalTable, KeyedTable, TimeTable, agg
from arroyo_dagster.dataflow.graph import EventTime, OperatorNode, Stepped, Where
from arroyo_dagster.dataflow.stream import Stream
from arroyo_dagster.errors import ConfigurationError
from tests.dataflow.helpers import BIDS, TIME, Nowhere, Rows, With, bids

INT, TEXT = pa.int64(), pa.string()
TOTALS = KeyedTable("totals", BIDS, ("auction",))
BUFFER = TimeTable("buffer", BIDS, "at")


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def unknown() -> Stream:
    """A stream of which nothing is known."""
    return Pipeline("auctions").source("bids", Rows(None), event_time="at")


class TestSteps:
    def test_leave_the_stream_as_it_was(self) -> None:
        stream = bids()
        filtered = stream.where("price > 1")
        assert filtered.expression == Stepped(stream.expression, Where("price > 1"))
        assert (filtered.fields, filtered.event_time) == (stream.fields, stream.event_time)

    @pytest.mark.parametrize(
        ("expressions", "fields"),
        [
            (("auction",), {"auction": INT}),
            ((" auction ", "name AS who", "price*2 as `double`"), {"auction": INT, "who": None, "double": None}),
            (("auction", "price * 2"), None),
            (("cast(price as int)",), None),
            (("*",), None),
        ],
    )
    def test_select_knows_its_columns_if_they_have_names(
        self, expressions: tuple[str, ...], fields: dict[str, Any] | None
    ) -> None:
        assert bids().select(*expressions).fields == fields

    def test_select_of_unknown_columns(self) -> None:
        assert unknown().select("a", "b AS c").fields == {"a": None, "c": None}

    def test_event_time_goes_with_its_column(self) -> None:
        assert bids().select("auction", "at").event_time == EventTime("at")
        assert bids().select("auction").event_time is None
        assert bids().map_batches(same, pa.schema([("n", INT)])).event_time is None

    def test_with_columns_adds_and_replaces(self) -> None:
        stream = bids().select("auction", "name").with_columns(name="upper(name)", self="1").with_column("n", "2")
        assert stream.fields == {"auction": INT, "name": None, "self": None, "n": None}
        assert unknown().with_column("n", "2").fields is None

    def test_sql_may_give_anything(self) -> None:
        assert bids().sql("SELECT upper(name) AS name FROM rows").fields is None

    def test_map_batches_gives_its_schema_or_what_it_got(self) -> None:
        assert bids().map_batches(same).fields == bids().fields
        assert bids().map_batches(same, pa.schema([("n", INT)])).fields == {"n": INT}

    @pytest.mark.parametrize(
        ("step", "complaint"),
        [
            (lambda s: s.where(""), "a condition must be a text in Spark SQL, not ''"),
            (lambda s: s.where(None), "a condition must be a text in Spark SQL, not None"),
            (lambda s: s.select(), "select needs at least one column or expression"),
            (lambda s: s.select("auktion"), "select: the stream has no column 'auktion'; it has auction, price, name"),
            (lambda s: s.select("auction", 5), "an expression must be a text in Spark SQL, not 5"),
            (lambda s: s.select("name", "auction AS name"), "select: two columns would be named 'name'; rename one"),
            (lambda s: s.select("price * 2", "name", "name"), "select: two columns would be named 'name'; rename one"),
            (lambda s: s.with_columns(), "with_columns needs at least one column"),
            (lambda s: s.with_column("n", " "), "an expression must be a text in Spark SQL, not ' '"),
            (lambda s: s.sql("SELECT 1"), "the query does not mention the table `rows`"),
            (lambda s: s.sql(7), "a query must be a text in Spark SQL, not 7"),
            (lambda s: s.map_batches("f"), "map_batches needs a function from batch to batch, not 'f'"),
            (lambda s: s.map_batches(same, {"n": INT}), "a schema must be a pyarrow.Schema, not {'n'"),
            (lambda s: s.map_batches(same, pa.schema([("n", INT)] * 2)), "a schema has two columns of one name: n, n"),
            (lambda s: s.key_by(), "key_by needs at least one column"),
            (lambda s: s.key_by("auktion"), "key_by: the stream has no column 'auktion'; it has auction, "),
            (lambda s: s.key_by("auction", "auction"), "key_by names the column 'auction' twice"),
            (lambda s: s.key_by(["auction"]), "key_by needs names of columns, not .'auction'."),
            (lambda s: s.key_by("tags"), "key_by: the column 'tags' is list<.*>, and a key has no nested values"),
        ],
    )
    def test_refuse(self, step: Callable[[Any], object], complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            step(bids())


class TestUnion:
    def test_has_the_columns_and_the_event_time_of_its_parts(self) -> None:
        one = bids()
        both = one.union(bids(one.pipeline, "more"), one)
        assert (both.fields, both.event_time) == (one.fields, EventTime("at"))

    def test_knows_what_one_of_them_knows(self) -> None:
        one = bids()
        assert one.sql("SELECT * FROM rows").union(one).fields == one.fields

    def test_has_no_event_time_unless_all_agree(self) -> None:
        one = bids()
        assert one.union(bids(one.pipeline, "timeless", None)).event_time is None

    def test_refuses_other_columns(self) -> None:
        one = bids()
        with pytest.raises(ConfigurationError, match=r"the same columns, not auction, .* and price, auction"):
            one.union(one.select("price", "auction"))

    def test_refuses_other_types(self) -> None:
        pipeline = Pipeline("auctions")
        one, other = (pipeline.source(str(kind), Rows(pa.schema([("n", kind)]))) for kind in (INT, TEXT))
        with pytest.raises(ConfigurationError, match="but 'n' is int64 in one and string in another"):
            one.union(other)

    @pytest.mark.parametrize("other", [bids(), "bids", None], ids=["another pipeline", "a text", "nothing"])
    def test_refuses_what_is_no_stream_of_this_pipeline(self, other: Any) -> None:
        with pytest.raises(ConfigurationError, match="only be combined with streams of the same pipeline"):
            bids().union(other)


class TestWindows:
    @pytest.mark.parametrize(
        ("build", "complaint"),
        [
            (lambda k: k.tumble("ten"), "the size of a window must be a duration .*, not 'ten'"),
            (lambda k: k.tumble(10), "the size of a window must be a duration .*, not 10"),
            (lambda k: k.tumble("0 seconds"), "the size of a window must be more than zero, not '0 seconds'"),
            (lambda k: k.tumble("1 s").aggregate("x"), "operator 'x' needs at least one aggregate"),
            (lambda k: k.tumble("1 s").aggregate("x", n="count"), "operator 'x': n must be an aggregate such as"),
            (lambda k: k.tumble("1 s").aggregate("x", n=agg.count), "operator 'x': n must be an aggregate such as"),
            (
                lambda k: k.tumble("1 s").aggregate("x", n=agg.sum("cost")),
                "operator 'x': the stream has no column 'cost'",
            ),
            (
                lambda k: k.tumble("1 s").aggregate("x", n=agg.sum("name")),
                "operator 'x': there is no sum of 'name', which",
            ),
            (
                lambda k: k.tumble("1 s").aggregate("x", n=agg.max("tags")),
                "operator 'x': there is no max of 'tags', which",
            ),
            (
                lambda k: k.tumble("1 s").aggregate("x", auction=agg.count()),
                "'x' would have two columns named 'auction'",
            ),
            (lambda k: k.tumble("1 s").aggregate("x", window_end=agg.count()), "two columns named 'window_end'"),
            (lambda k: k.tumble("1 s").aggregate("x", late_to="y", n=agg.count()), "sink 'x_late' must be a Sink"),
        ],
    )
    def test_refuse(self, build: Callable[[Any], object], complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            build(bids().key_by("auction"))

    def test_a_key_of_the_name_of_a_window_is_refused(self) -> None:
        first = bids().key_by("auction").tumble("1 s").aggregate("first", n=agg.count())
        with pytest.raises(ConfigurationError, match="'second' would have two columns named 'window_start'"):
            first.key_by("window_start").tumble("1 s").aggregate("second", n=agg.count())

    def test_need_event_time(self) -> None:
        for stream in (bids(event_time=None), bids().select("auction"), bids().process("op", With(), schema=BIDS)):
            with pytest.raises(ConfigurationError, match="a window needs event time: give the source an event_time="):
                stream.key_by("auction").tumble("1 s")

    def test_late_rows_have_a_sink_named_after_the_operator(self) -> None:
        stream = bids()
        stream.key_by("auction").tumble("1 s").aggregate("stats", late_to=Nowhere(), n=agg.count()).sink("o", Nowhere())
        [operator] = stream.pipeline.graph().operators
        assert operator.late_to == "stats_late"

    def test_a_windows_rows_happened_just_before_its_end(self) -> None:
        result = bids().key_by("auction", "name").tumble("1 s").aggregate("stats", n=agg.count(), m=agg.mean("price"))
        assert result.event_time == EventTime("window_end", -1)
        assert result.fields == {
            "auction": INT,
            "name": TEXT,
            "window_start": TIME,
            "window_end": TIME,
            "n": INT,
            "m": pa.float64(),
        }

    def test_of_unknown_columns_have_unknown_types(self) -> None:
        result = unknown().key_by("k").tumble("1 s").aggregate("stats", n=agg.count("x"), m=agg.max("y"))
        assert result.fields == {"k": None, "window_start": None, "window_end": None, "n": INT, "m": None}


class TestProcess:
    def test_tells_what_it_was_told(self) -> None:
        result = bids().key_by("auction").process("op", With(TOTALS, BUFFER), schema=BIDS, event_time="at")
        assert isinstance(result.expression, OperatorNode)
        assert result.expression.keyed
        assert (result.fields, result.event_time) == (bids().fields, EventTime("at"))
        plain = bids().process("op", With())
        assert isinstance(plain.expression, OperatorNode)
        assert not plain.expression.keyed
        assert (plain.fields, plain.event_time) == (None, None)

    def test_the_width_of_an_integer_key_may_differ(self) -> None:
        narrow = KeyedTable("totals", pa.schema([("auction", pa.int32()), ("n", INT)]), ("auction",))
        bids().key_by("auction").process("op", With(narrow))

    @pytest.mark.parametrize(
        ("build", "complaint"),
        [
            (
                lambda s: s.process("op", With),
                "operator 'op' must be an instance of a subclass of Operator, not <class",
            ),
            (lambda s: s.key_by("auction").process("op", None), "operator 'op' must be an instance of a subclass of"),
            (lambda s: s.process("op", With(BIDS)), r"operator 'op': tables\(\) must return tables such as KeyedTable"),
            (
                lambda s: s.process("op", With(TOTALS, TOTALS)),
                "operator 'op' has two tables of one name: totals, totals",
            ),
            (lambda s: s.select("auction").process("op", With(BUFFER)), "'op' has a TimeTable, .*: its input has none"),
            (
                lambda s: s.key_by("auction", "name").process("op", With(TOTALS)),
                "operator 'op': the key of table 'totals' must contain the key of the stream, auction, name",
            ),
            (
                lambda s: s.key_by("auction").process("op", With(TimeTable("b", pa.schema([("at", TIME)]), "at"))),
                "operator 'op': the columns of table 'b' must contain the key of the stream, auction",
            ),
            (
                lambda s: s.key_by("auction").process(
                    "op", With(KeyedTable("b", pa.schema({"auction": TEXT}), ("auction",)))
                ),
                "operator 'op': the column 'auction' of table 'b' is string, but int64 in the stream",
            ),
            (
                lambda s: s.process("op", With(), event_time="at", schema=pa.schema({"n": INT})),
                "'op': there is no column 'at'",
            ),
            (
                lambda s: s.process("op", With(), event_time="n", schema=pa.schema({"n": INT})),
                "'op': the event time 'n' is",
            ),
            (lambda s: s.process("op", With(), schema="n int"), "a schema must be a pyarrow.Schema, not 'n int'"),
            (lambda s: s.process("op", With(), bids()), "only be combined with streams of the same pipeline"),
            (
                lambda s: s.process("op", With(), s.key_by("auction")),
                "only be combined with streams of the same pipeline",
            ),
            (
                lambda s: s.key_by("auction").process("op", With(), s),
                "operator 'op': its second input must be keyed too",
            ),
            (
                lambda s: s.key_by("auction").process("op", With(), bids().key_by("auction")),
                "only be combined with streams of the same pipeline",
            ),
            (
                lambda s: s.key_by("auction").process("op", With(), s.key_by("name")),
                "operator 'op': both inputs must have keys of the same number and types",
            ),
            (
                lambda s: s.key_by("auction").process("op", With(), s.key_by("auction", "name")),
                "operator 'op': both inputs must have keys of the same number and types",
            ),
        ],
    )
    def test_refuses(self, build: Callable[[Any], object], complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            build(bids())

    def test_a_global_table_needs_no_key_of_the_stream(self) -> None:
        bids().key_by("auction").process("op", With(GlobalTable("rates", pa.schema({"currency": TEXT}), ("currency",))))


class TestTables:
    @pytest.mark.parametrize(
        ("build", "complaint"),
        [
            (lambda: KeyedTable("a b", BIDS, ("auction",)), "the table name 'a b' is not usable"),
            (lambda: KeyedTable(None, BIDS, ("auction",)), "the table name None is not usable"),  # type: ignore[arg-type]
            (lambda: KeyedTable("t", {"auction": INT}, ("auction",)), "table 't': its schema must be a pyarrow.Schema"),
            (lambda: KeyedTable("t", BIDS, "auction"), "table 't': its key must be a tuple .*, not 'auction'"),  # type: ignore[arg-type]
            (lambda: KeyedTable("t", BIDS, ()), "table 't': its key must be a tuple of at least one column"),
            (lambda: KeyedTable("t", BIDS, ("auktion",)), "table 't' has no column 'auktion'; it has auction, "),
            (
                lambda: KeyedTable("t", BIDS, ("tags",)),
                "table 't': the column 'tags' is list<.*>, which cannot be a key",
            ),
            (
                lambda: GlobalTable("t", BIDS, ("tags",)),
                "table 't': the column 'tags' is list<.*>, which cannot be a key",
            ),
            (
                lambda: KeyedTable("t", pa.schema([("a", INT), ("a", INT)]), ("a",)),
                "table 't' has two columns of one name: a, a",
            ),
            (
                lambda: KeyedTable("t", pa.schema([("a", INT), ("found", INT)]), ("a",)),
                "table 't' has a column 'found', a name that it needs for itself",
            ),
            (
                lambda: KeyedTable("t", pa.schema([("a", INT), ("b", pa.string_view())]), ("a",)),
                "table 't': the column 'b' is string_view, which state tables cannot hold",
            ),
            (lambda: TimeTable("t", BIDS, "when"), "table 't' has no column 'when'; it has auction, "),
            (lambda: TimeTable("t", BIDS, "auction"), "the time column 'auction' is int64, not a timestamp"),
            (lambda: TimeTable("t", BIDS, "at", "long"), "table 't': its retention must be a duration .*, not 'long'"),
        ],
    )
    def test_refuse(self, build: Callable[[], object], complaint: str) -> None:
        with pytest.raises(ConfigurationError, match=complaint):
            build()

    @pytest.mark.parametrize("kind", [pa.float16(), pa.null(), pa.uuid(), pa.dictionary(pa.int8(), TEXT)], ids=str)
    def test_a_key_that_cannot_be_compared_is_refused(self, kind: pa.DataType) -> None:
        with pytest.raises(ConfigurationError, match=r"the column 'k' is .*, which cannot be a key"):
            KeyedTable("t", pa.schema([("k", kind)]), ("k",))
