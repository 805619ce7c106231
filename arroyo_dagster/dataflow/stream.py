"""Streams: what a user chains steps, operators and sinks to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import types

from arroyo_dagster.dataflow.agg import Aggregate, plain
from arroyo_dagster.dataflow.duration import DurationLike, microseconds
from arroyo_dagster.dataflow.graph import (
    EventTime,
    Expression,
    Fields,
    Inlet,
    MapBatches,
    OperatorNode,
    Select,
    Sql,
    Step,
    Stepped,
    Union,
    Where,
    WindowAggregate,
    WithColumns,
)
from arroyo_dagster.dataflow.operator import Operator
from arroyo_dagster.dataflow.sink import Sink
from arroyo_dagster.dataflow.tables import GlobalTable, KeyedTable, TableSpec, TimeTable
from arroyo_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from arroyo_dagster.dataflow.pipeline import Pipeline

WINDOW_START, WINDOW_END = "window_start", "window_end"

_COLUMN = re.compile(r"\w+")
_NAMED = re.compile(r".*\s[aA][sS]\s+`?(\w+)`?", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Rows on their way. Every method returns a new stream and leaves this one as it was.

    `fields` are the columns as far as they are known, `event_time` tells when a row happened.
    """

    pipeline: Pipeline
    expression: Expression
    fields: Fields | None
    event_time: EventTime | None

    def where(self, condition: str) -> Stream:
        """Keep the rows that meet a condition in Spark SQL: `where("price > 100")`."""
        return self._stepped(Where(_sql("a condition", condition)), self.fields)

    def select(self, *expressions: str) -> Stream:
        """Keep columns, or expressions in Spark SQL: `select("auction", "price * 0.9 AS euros")`."""
        if not expressions:
            raise ConfigurationError("select needs at least one column or expression")
        fields: dict[str, pa.DataType | None] = {}
        unnamed = False
        for expression in (_sql("an expression", text).strip() for text in expressions):
            if plain_column := _COLUMN.fullmatch(expression):
                name, kind = plain_column[0], self._type_of(expression, "select")
            elif named := _NAMED.fullmatch(expression):
                name, kind = named[1], None
            else:
                unnamed = True  # only Spark can tell
                continue
            if name in fields:
                raise ConfigurationError(f"select: two columns would be named {name!r}; rename one with AS")
            fields[name] = kind
        return self._stepped(Select(expressions), None if unnamed else fields)

    def with_columns(self, /, **columns: str) -> Stream:
        """Add or replace columns by expressions in Spark SQL: `with_columns(euros="price * 0.9")`."""
        if not columns:
            raise ConfigurationError("with_columns needs at least one column, as name=expression")
        for text in columns.values():
            _sql("an expression", text)
        fields = None if self.fields is None else {**self.fields, **dict.fromkeys(columns)}
        return self._stepped(WithColumns(tuple(columns.items())), fields)

    def with_column(self, name: str, expression: str) -> Stream:
        """Add or replace one column by an expression in Spark SQL."""
        return self.with_columns(**{name: expression})

    def sql(self, query: str) -> Stream:
        """Run a query in Spark SQL that looks at one row at a time: `sql("SELECT upper(name) AS name FROM rows")`.

        A query that has to see rows together (GROUP BY, DISTINCT, ORDER BY, LIMIT, a join of `rows` with itself) is
        refused when the pipeline first runs: an epoch is no meaningful unit for it; use aggregate or process. A join
        with a table of Spark's is fine if that table is small enough to be sent to every task.
        """
        if not re.search(r"\brows\b", _sql("a query", query)):
            raise ConfigurationError("the query does not mention the table `rows`: SELECT ... FROM rows")
        return self._stepped(Sql(query), None)

    def map_batches(
        self, function: Callable[[pa.RecordBatch], pa.RecordBatch], schema: pa.Schema | None = None
    ) -> Stream:
        """Apply a function to every Arrow batch. It keeps no state, and does the same every time.

        Give a schema when the columns that come out are not those that go in.
        """
        if not callable(function):
            raise ConfigurationError(f"map_batches needs a function from batch to batch, not {function!r}")
        return self._stepped(MapBatches(function, schema), self.fields if schema is None else fields_of(schema))

    def union(self, *others: Stream) -> Stream:
        """Put streams of the same columns together."""
        streams = (self, *others)
        for other in others:
            _same_pipeline(self, other)
            _same_fields(self.fields, other.fields)
        same_time = all(stream.event_time == self.event_time for stream in streams)
        fields = next((stream.fields for stream in streams if stream.fields is not None), None)
        parents = tuple(stream.expression for stream in streams)
        return Stream(self.pipeline, Union(parents), fields, self.event_time if same_time else None)

    def key_by(self, *columns: str) -> KeyedStream:
        """Spread the rows over subtasks by the values of these columns, so that equal ones meet."""
        if not columns:
            raise ConfigurationError("key_by needs at least one column")
        for column in columns:
            if not isinstance(column, str):
                raise ConfigurationError(f"key_by needs names of columns, not {column!r}")
            if columns.count(column) > 1:
                raise ConfigurationError(f"key_by names the column {column!r} twice")
            kind = self._type_of(column, "key_by")
            if kind is not None and types.is_nested(kind):
                raise ConfigurationError(f"key_by: the column {column!r} is {kind}, and a key has no nested values")
        return KeyedStream(self, tuple(columns))

    def process(
        self,
        name: str,
        operator: Operator,
        other: Stream | None = None,
        *,
        schema: pa.Schema | None = None,
        event_time: str | None = None,
    ) -> Stream:
        """Send every row to one subtask of an operator of your own. To spread the work, `key_by` first.

        Rows of `other` arrive as `input=1`. `schema` and `event_time` tell what the operator emits, for the
        steps behind it that want to know.
        """
        streams = (self,) if other is None else (self, other)
        return _process(streams, ((),) * len(streams), name, operator, schema, event_time)

    def sink(self, name: str, sink: Sink) -> Stream:
        """Let the rows go out. A stream may have any number of sinks."""
        self.pipeline.declare_sink(name, sink, self.expression, self.fields)
        return self

    def _stepped(self, step: Step, fields: Fields | None) -> Stream:
        if self.event_time and fields is not None and self.event_time.column not in fields:
            return Stream(self.pipeline, Stepped(self.expression, step), fields, None)
        return replace(self, expression=Stepped(self.expression, step), fields=fields)

    def _type_of(self, column: str, what: str) -> pa.DataType | None:
        if self.fields is None:
            return None
        if column not in self.fields:
            raise ConfigurationError(
                f"{what}: the stream has no column {column!r}; it has {', '.join(self.fields) or 'none'}"
            )
        return self.fields[column]


@dataclass(frozen=True, slots=True, eq=False)
class KeyedStream:
    """Rows that meet by key."""

    stream: Stream
    keys: tuple[str, ...]

    def tumble(self, size: DurationLike) -> WindowedStream:
        """Cut event time into windows of one size that follow each other, aligned to 1970 in UTC."""
        width = microseconds(size, "the size of a window")
        if width <= 0:
            raise ConfigurationError(f"the size of a window must be more than zero, not {size!r}")
        if self.stream.event_time is None:
            raise ConfigurationError(
                "a window needs event time: give the source an event_time=, and keep that column on the way"
            )
        return WindowedStream(self, width)

    def process(
        self,
        name: str,
        operator: Operator,
        other: KeyedStream | None = None,
        *,
        schema: pa.Schema | None = None,
        event_time: str | None = None,
    ) -> Stream:
        """Send the rows through an operator of your own; rows with one key meet in one subtask.

        Rows of `other` arrive as `input=1`; its keys must be of the same types. `schema` and `event_time` tell
        what the operator emits, for the steps behind it that want to know.
        """
        if other is not None and not isinstance(other, KeyedStream):
            raise ConfigurationError(f"operator {name!r}: its second input must be keyed too: use key_by on it")
        inlets = (self,) if other is None else (self, other)
        _same_keys(inlets, name)
        for table in _tables_of(operator, name):
            if not isinstance(table, GlobalTable):
                self._check_table(table, name)
        streams, keys = tuple(inlet.stream for inlet in inlets), tuple(inlet.keys for inlet in inlets)
        return _process(streams, keys, name, operator, schema, event_time)

    def _check_table(self, table: TimeTable | KeyedTable, name: str) -> None:
        """See that a table's rows can move with their keys."""
        where, columns = ("key", table.key) if isinstance(table, KeyedTable) else ("columns", tuple(table.schema.names))
        if not set(self.keys) <= set(columns):
            raise ConfigurationError(
                f"operator {name!r}: the {where} of table {table.name!r} must contain the key of the stream, "
                f"{', '.join(self.keys)}, so that its rows can move with it"
            )
        for key in self.keys:
            kind, stored = (self.stream.fields or {}).get(key), table.schema.field(key).type
            if kind is not None and stored != kind and not (types.is_integer(stored) and types.is_integer(kind)):
                raise ConfigurationError(
                    f"operator {name!r}: the column {key!r} of table {table.name!r} is {stored}, but {kind} in the "
                    "stream, which is keyed by it: make them the same"
                )


@dataclass(frozen=True, slots=True, eq=False)
class WindowedStream:
    """Rows that meet by key and window."""

    keyed: KeyedStream
    size: int

    def aggregate(self, name: str, *, late_to: Sink | None = None, **aggregates: Aggregate) -> Stream:
        """Aggregate each key's rows of each window, and emit one row once the watermark has passed the window's end.

        The rows have the key columns, `window_start`, `window_end`, and a column for each aggregate. A row that comes
        after its window was closed is late: it is counted, and goes to the sink `late_to`, which is then known as
        `<name>_late`, if there is one. Rows without a time are late too.
        """
        stream, event_time = self.keyed.stream, self.keyed.stream.event_time
        assert event_time is not None
        if not aggregates:
            raise ConfigurationError(f"operator {name!r} needs at least one aggregate, bids=agg.count() for example")
        time_type = stream.fields.get(event_time.column) if stream.fields is not None else None
        fields: dict[str, pa.DataType | None] = {
            key: kind if kind is None else plain(kind)
            for key, kind in ((key, (stream.fields or {}).get(key)) for key in self.keyed.keys)
        }
        window = None if time_type is None else pa.timestamp("us", getattr(time_type, "tz", None))
        for column, kind in ((WINDOW_START, window), (WINDOW_END, window)):
            _add_field(fields, column, kind, name)
        for column, aggregate in aggregates.items():
            if not isinstance(aggregate, Aggregate):
                raise ConfigurationError(f"operator {name!r}: {column} must be an aggregate such as agg.count()")
            of = f"operator {name!r}"
            input_type = stream._type_of(aggregate.column, of) if aggregate.column else None
            _add_field(fields, column, aggregate.result_type(input_type, of), name)
        spec = WindowAggregate(self.keyed.keys, self.size, event_time, tuple(aggregates.items()))
        inlet = Inlet(stream.expression, self.keyed.keys)
        late_name = f"{name}_late" if late_to else None
        node = stream.pipeline.declare_operator(OperatorNode(name, spec, (inlet,), late_name, fields))
        if late_to:
            stream.pipeline.declare_sink(f"{name}_late", late_to, None, stream.fields)
        # A window's rows happened just before its end, so that wider windows behind it take them in at once.
        return Stream(stream.pipeline, node, fields, EventTime(WINDOW_END, -1))


def fields_of(schema: pa.Schema) -> Fields:
    """The columns of a schema."""
    if not isinstance(schema, pa.Schema):
        raise ConfigurationError(f"a schema must be a pyarrow.Schema, not {schema!r}")
    if len(set(schema.names)) < len(schema.names):
        raise ConfigurationError(f"a schema has two columns of one name: {', '.join(schema.names)}")
    return dict(zip(schema.names, schema.types, strict=True))


def _process(
    streams: tuple[Stream, ...],
    keys: tuple[tuple[str, ...], ...],
    name: str,
    operator: Operator,
    schema: pa.Schema | None,
    event_time: str | None,
) -> Stream:
    first = streams[0]
    tables = _tables_of(operator, name)
    for stream in streams[1:]:
        _same_pipeline(first, stream)
    if any(isinstance(table, TimeTable) for table in tables) and first.event_time is None:
        raise ConfigurationError(f"operator {name!r} has a TimeTable, which expires by event time: its input has none")
    inlets = tuple(Inlet(stream.expression, key) for stream, key in zip(streams, keys, strict=True))
    fields = None if schema is None else fields_of(schema)
    node = first.pipeline.declare_operator(OperatorNode(name, operator, inlets, fields=fields))
    result = Stream(first.pipeline, node, fields, None)
    if event_time is not None:
        check_time(fields, event_time, f"operator {name!r}")
        result = replace(result, event_time=EventTime(event_time))
    return result


def _tables_of(operator: Operator, name: str) -> Sequence[TableSpec]:
    if not isinstance(operator, Operator):
        raise ConfigurationError(f"operator {name!r} must be an instance of a subclass of Operator, not {operator!r}")
    tables = operator.tables()
    for table in tables:
        if not isinstance(table, TimeTable | KeyedTable | GlobalTable):
            raise ConfigurationError(
                f"operator {name!r}: tables() must return tables such as KeyedTable, not {table!r}"
            )
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"operator {name!r} has two tables of one name: {', '.join(names)}")
    return tables


def check_time(fields: Fields | None, column: str, what: str) -> None:
    """See that a column can be event time, as far as that is known."""
    if fields is None:
        return
    if column not in fields:
        raise ConfigurationError(f"{what}: there is no column {column!r} for event time; there are {', '.join(fields)}")
    kind = fields[column]
    if kind is not None and not types.is_timestamp(kind):
        raise ConfigurationError(f"{what}: the event time {column!r} is {kind}; make it a timestamp")


def _add_field(fields: dict[str, pa.DataType | None], column: str, kind: pa.DataType | None, name: str) -> None:
    if column in fields:
        raise ConfigurationError(f"operator {name!r} would have two columns named {column!r}: rename one")
    fields[column] = kind


def _same_keys(inlets: tuple[KeyedStream, ...], name: str) -> None:
    first, *others = ([(inlet.stream.fields or {}).get(key) for key in inlet.keys] for inlet in inlets)
    for other in others:
        known = [(a, b) for a, b in zip(first, other, strict=False) if a is not None and b is not None]
        if len(first) != len(other) or any(a != b for a, b in known):
            raise ConfigurationError(f"operator {name!r}: both inputs must have keys of the same number and types")


def _same_fields(one: Fields | None, other: Fields | None) -> None:
    if one is None or other is None:
        return
    if list(one) != list(other):
        raise ConfigurationError(
            f"a union needs streams of the same columns, not {', '.join(one)} and {', '.join(other)}"
        )
    for name, kind in one.items():
        if kind is not None and other[name] is not None and kind != other[name]:
            raise ConfigurationError(
                f"a union needs streams of the same columns, but {name!r} is {kind} in one and {other[name]} in another"
            )


def _same_pipeline(one: Stream, other: Stream) -> None:
    if not isinstance(other, Stream) or one.pipeline is not other.pipeline:
        raise ConfigurationError("streams can only be combined with streams of the same pipeline")


def _sql(what: str, text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"{what} must be a text in Spark SQL, not {text!r}")
    return text
