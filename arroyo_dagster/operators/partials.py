"""Partial aggregates: made before the shuffle, merged after it, kept until their window closes. Arrow in, Arrow out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from arroyo_dagster.dataflow.agg import Aggregate, AggregateKind, plain
from arroyo_dagster.dataflow.graph import WindowAggregate
from arroyo_dagster.dataflow.stream import WINDOW_END, WINDOW_START
from arroyo_dagster.errors import AttemptError, ConfigurationError
from arroyo_dagster.state.hashing import canonical
from arroyo_dagster.state.times import to_micros

NO_TIME = -(1 << 62)
"""The time of a row that has none: earlier than any."""

_ROW = "row of"


@dataclass(frozen=True, slots=True)
class _Part:
    """One column of a partial aggregate: `function` makes it from the input, `merge` from other partials."""

    name: str
    type: pa.DataType
    column: str | None
    cast: pa.DataType | None
    function: str
    merge: str | None

    @property
    def input(self) -> str:
        """What the column that it is made from is called while it is made."""
        return f"{self.column} as {'distinct ' if self.function == 'distinct' else ''}{self.cast}"


class Partials:
    """The partial aggregates of a window operator over rows of some schema."""

    def __init__(
        self,
        spec: WindowAggregate,
        time: pa.DataType,
        keys: Sequence[pa.DataType],
        inputs: Sequence[pa.DataType | None],
    ) -> None:
        """Work out which columns the partials have, from the types of event time, keys and aggregated columns."""
        if not types.is_timestamp(time):
            raise ConfigurationError(f"the event time {spec.event_time.column!r} is {time}; make it a timestamp")
        self._spec = spec
        self._time = pa.timestamp("us", time.tz)
        self._keys = [pa.field(key, plain(kind)) for key, kind in zip(spec.keys, keys, strict=True)]
        self._parts = {
            name: tuple(_parts(name, aggregate, kind and plain(kind)))
            for (name, aggregate), kind in zip(spec.aggregates, inputs, strict=True)
        }
        names = self.schema.names
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"two columns of the partial aggregates are named {name!r}: rename one")

    @classmethod
    def over(cls, spec: WindowAggregate, rows: pa.Schema) -> Partials:
        """The partials of rows of this schema."""
        time = _type_of(rows, spec.event_time.column)
        inputs = [None if agg.column is None else _type_of(rows, agg.column) for _, agg in spec.aggregates]
        return cls(spec, time, [_type_of(rows, key) for key in spec.keys], inputs)

    @classmethod
    def stored_as(cls, spec: WindowAggregate, stored: pa.Schema) -> Partials:
        """The partials that lie on storage with this schema. They can be merged and finished."""
        inputs = [_input_type(name, aggregate, stored) for name, aggregate in spec.aggregates]
        return cls(spec, _type_of(stored, WINDOW_START), [_type_of(stored, key) for key in spec.keys], inputs)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the partials: window start, keys, and what each aggregate needs."""
        parts = [pa.field(part.name, part.type) for parts in self._parts.values() for part in parts]
        return pa.schema([pa.field(WINDOW_START, self._time), *self._keys, *parts])

    def times(self, rows: pa.Table) -> npt.NDArray[np.int64]:
        """Event times in microseconds; `NO_TIME` for rows without one."""
        micros = to_micros(rows[self._spec.event_time.column])
        times: npt.NDArray[np.int64] = pc.fill_null(micros, NO_TIME - self._spec.event_time.shift).to_numpy()
        return times + self._spec.event_time.shift if self._spec.event_time.shift else times

    def make(self, rows: pa.Table, times: npt.NDArray[np.int64]) -> pa.Table:
        """Aggregate rows by window and key."""
        columns = self._inputs(rows, times)
        wanted: list[tuple[str | list[str], str]] = []
        for part in self._all_parts():
            wish: tuple[str | list[str], str] = (part.input, part.function)
            if part.column is None:
                wish = ([], "count_all")
            if wish not in wanted:
                wanted.append(wish)
        table = pa.table(columns)
        self._check_sums(table, [part.input for part in self._all_parts() if part.function == "sum"])
        return self._with_squares(_grouped(table, [WINDOW_START, *self._spec.keys], wanted))

    def spread(self, rows: pa.Table, times: npt.NDArray[np.int64]) -> pa.Table:
        """Make each row a partial of its own, which costs less than to look for rows to aggregate it with."""
        columns = self._inputs(rows, times)
        result = [columns[name] for name in (WINDOW_START, *self._spec.keys)]
        for part in self._all_parts():
            match part.function:
                case "count" if part.column is None:
                    column = pa.array(np.ones(rows.num_rows, np.int64))
                case "count":
                    column = pc.is_valid(columns[part.input]).cast(pa.int64())
                case "variance":
                    column = pc.if_else(pc.is_valid(columns[part.input]), 0.0, pa.scalar(None, pa.float64()))
                case "distinct":
                    column = _one_each(columns[part.input])
                case _:
                    column = columns[part.input]
            result.append(column.cast(part.type))
        return pa.table(result, schema=self.schema)

    def merge(self, partials: pa.Table) -> pa.Table:
        """Aggregate partials by window and key."""
        keys = [WINDOW_START, *self._spec.keys]
        simple = [part for part in self._all_parts() if part.merge is not None]
        wanted: list[tuple[str, str]] = [(part.name, part.merge) for part in simple if part.merge is not None]
        self._check_sums(partials, [name for name, function in wanted if function == "sum"])
        if len(simple) == sum(map(len, self._parts.values())):
            merged = _grouped(partials, keys, wanted)
            return self._fitted(merged.columns, merged.column_names, keys, simple)
        numbered = partials.append_column(_ROW, pa.array(np.arange(partials.num_rows)))
        merged = _grouped(numbered, keys, [*wanted, (_ROW, "list")])
        rows = merged[f"{_ROW}_list"].combine_chunks()
        groups = np.empty(partials.num_rows, np.int64)
        groups[rows.flatten().to_numpy()] = pc.list_parent_indices(rows).to_numpy()
        columns = {name: merged[name] for name in keys} | {
            part.name: merged[f"{part.name}_{part.merge}"] for part in simple
        }
        for name, aggregate in self._spec.aggregates:
            if aggregate.kind is AggregateKind.STDDEV:
                columns |= _merged_moments(name, partials, groups, merged.num_rows)
            elif aggregate.kind is AggregateKind.COUNT_DISTINCT:
                part = self._parts[name][0]
                columns[part.name] = _merged_values(partials[part.name], groups, merged.num_rows)
        return pa.table([columns[name] for name in self.schema.names], schema=self.schema)

    def finish(self, partials: pa.Table) -> pa.Table:
        """Turn merged partials, one a window and key, into the rows that the operator emits."""
        start = partials[WINDOW_START]
        end = pc.add(start.cast(pa.int64()), self._spec.size).cast(self._time)
        columns = [*(partials[key] for key in self._spec.keys), start, end]
        columns += [_result(name, aggregate, partials) for name, aggregate in self._spec.aggregates]
        names = [*self._spec.keys, WINDOW_START, WINDOW_END, *(name for name, _ in self._spec.aggregates)]
        return pa.table(columns, names=names)

    def _inputs(self, rows: pa.Table, times: npt.NDArray[np.int64]) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Window starts, keys, and the columns that the parts are made from."""
        starts = pa.array(times // self._spec.size * self._spec.size).view(self._time)
        columns: dict[str, pa.Array | pa.ChunkedArray] = {WINDOW_START: starts}
        for key in self._keys:
            columns[key.name] = canonical(rows[key.name].cast(key.type))
        for part in self._all_parts():
            if part.column is not None and part.input not in columns:
                columns[part.input] = _cast(rows[part.column], part)
        return columns

    def _all_parts(self) -> Iterator[_Part]:
        for parts in self._parts.values():
            yield from parts

    def _with_squares(self, result: pa.Table) -> pa.Table:
        """Turn variances into sums of squares, which can be merged, and give every column its name and type."""
        keys = [WINDOW_START, *self._spec.keys]
        named: dict[str, pa.ChunkedArray] = {key: result[key] for key in keys}
        for part in self._all_parts():
            source = "count_all" if part.column is None else f"{part.input}_{part.function}"
            column = result[source]
            if part.function == "variance":
                count = result[f"{part.input}_count"].cast(pa.float64())
                column = pc.multiply(column, count)
            named[part.name] = column.cast(part.type)
        return pa.table([named[name] for name in self.schema.names], schema=self.schema)

    def _fitted(
        self, columns: Sequence[pa.ChunkedArray], names: Sequence[str], keys: Sequence[str], parts: Sequence[_Part]
    ) -> pa.Table:
        by_name = dict(zip(names, columns, strict=True))
        ordered = [by_name[key] for key in keys] + [by_name[f"{part.name}_{part.merge}"] for part in parts]
        fitted = [column.cast(field.type) for column, field in zip(ordered, self.schema, strict=True)]
        return pa.table(fitted, schema=self.schema)

    def _check_sums(self, table: pa.Table, names: Sequence[str]) -> None:
        """Arrow's sums of integers and decimals wrap around: refuse where that cannot be ruled out."""
        for name in dict.fromkeys(names):
            column = table[name]
            if types.is_floating(column.type) or not table.num_rows:
                continue
            least, most, wide = _sum_limits(column.type)
            bounds = [bound or 0 for bound in pc.min_max(column).as_py().values()]
            if all(least <= bound * table.num_rows <= most for bound in bounds):
                continue
            keys = [WINDOW_START, *self._spec.keys]
            exact = table.select(keys).append_column(name, column.cast(wide))
            sums = exact.group_by(keys, use_threads=False).aggregate([(name, "sum")])[f"{name}_sum"]
            if any(not least <= bound <= most for bound in pc.min_max(sums).as_py().values()):
                raise AttemptError(
                    f"the sum {name!r} does not fit into {column.type}: cast its column to a float, or to a decimal"
                )


def _sum_limits(kind: pa.DataType) -> tuple[int | Decimal, int | Decimal, pa.DataType]:
    """The least and the greatest sum that fits, and a type that takes any sum."""
    if types.is_integer(kind):
        return -(1 << 63), (1 << 63) - 1, pa.decimal128(38, 0)
    most = Decimal((0, (9,) * 38, -kind.scale))
    return -most, most, pa.decimal256(76, kind.scale)


def _parts(name: str, aggregate: Aggregate, kind: pa.DataType | None) -> Iterator[_Part]:
    column = aggregate.column
    result = aggregate.result_type(kind, name)
    match aggregate.kind:
        case AggregateKind.COUNT:
            yield _Part(name, pa.int64(), column, kind, "count", "sum")
        case AggregateKind.SUM:
            yield _Part(name, result, column, result, "sum", "sum")
        case AggregateKind.MIN:
            yield _Part(name, result, column, kind, "min", "min")
        case AggregateKind.MAX:
            yield _Part(name, result, column, kind, "max", "max")
        case AggregateKind.MEAN:
            total = Aggregate(AggregateKind.SUM, column).result_type(kind, name)
            yield _Part(f"{name}__sum", total, column, total, "sum", "sum")
            yield _Part(f"{name}__count", pa.int64(), column, total, "count", "sum")
        case AggregateKind.STDDEV:
            yield _Part(f"{name}__count", pa.int64(), column, pa.float64(), "count", None)
            yield _Part(f"{name}__mean", pa.float64(), column, pa.float64(), "mean", None)
            yield _Part(f"{name}__squares", pa.float64(), column, pa.float64(), "variance", None)
        case AggregateKind.COUNT_DISTINCT:
            yield _Part(f"{name}__values", pa.list_(kind), column, kind, "distinct", None)


def _cast(column: pa.ChunkedArray, part: _Part) -> pa.ChunkedArray:
    try:
        # Large integers lose digits when they become floats.
        cast = column.cast(part.cast, safe=not types.is_floating(part.cast))
    except pa.ArrowInvalid as error:
        raise AttemptError(
            f"{part.name!r}: a value of {part.column!r} does not fit into {part.cast} ({error})"
        ) from error
    return canonical(cast) if part.function == "distinct" else cast


def _grouped(table: pa.Table, keys: Sequence[str], wanted: Sequence[tuple[str | list[str], str]]) -> pa.Table:
    """Group and aggregate. Arrow's maximum leaves NaN out, which is the greatest of all."""
    greatest = [name for name, function in wanted if function == "max" and isinstance(name, str)]
    floats = [
        name for name in greatest if types.is_floating(table[name].type) and pc.any(pc.is_nan(table[name])).as_py()
    ]
    for name in floats:
        table = table.append_column(f"{name} is nan", pc.is_nan(table[name]))
    marks = [(f"{name} is nan", "any") for name in floats]
    result = table.group_by(list(keys), use_threads=False).aggregate([*wanted, *marks])
    for name in floats:
        column, place = result[f"{name}_max"], result.column_names.index(f"{name}_max")
        marked = pc.fill_null(result[f"{name} is nan_any"], False)
        column = pc.if_else(marked, pa.scalar(np.nan, column.type), column)
        result = result.set_column(place, f"{name}_max", column)
    return result


def _input_type(name: str, aggregate: Aggregate, stored: pa.Schema) -> pa.DataType | None:
    """A type of the aggregated column that leads to what is stored."""
    match aggregate.kind:
        case AggregateKind.COUNT:
            return None if aggregate.column is None else pa.int64()
        case AggregateKind.MEAN:
            return _type_of(stored, f"{name}__sum")
        case AggregateKind.STDDEV:
            return pa.float64()
        case AggregateKind.COUNT_DISTINCT:
            return _type_of(stored, f"{name}__values").value_type
        case _:
            return _type_of(stored, name)


def _result(name: str, aggregate: Aggregate, partials: pa.Table) -> pa.ChunkedArray:
    match aggregate.kind:
        case AggregateKind.MEAN:
            total = partials[f"{name}__sum"].cast(pa.float64(), safe=False)
            count = partials[f"{name}__count"].cast(pa.float64())
            return pc.divide(total, pc.if_else(pc.equal(count, 0.0), pa.scalar(None, pa.float64()), count))
        case AggregateKind.STDDEV:
            count = partials[f"{name}__count"].cast(pa.float64())
            freedom = pc.if_else(pc.greater(count, 1.0), pc.subtract(count, 1.0), pa.scalar(None, pa.float64()))
            return pc.sqrt(pc.divide(partials[f"{name}__squares"], freedom))
        case AggregateKind.COUNT_DISTINCT:
            return pc.list_value_length(partials[f"{name}__values"]).cast(pa.int64())
        case _:
            return partials[name]


def _merged_moments(name: str, partials: pa.Table, groups: npt.NDArray[np.int64], count: int) -> dict[str, pa.Array]:
    """Merge counts, means and sums of squares around the mean, without the cancellation of plain sums."""
    sizes = partials[f"{name}__count"].to_numpy()
    means = np.where(sizes > 0, pc.fill_null(partials[f"{name}__mean"], 0.0).to_numpy(), 0.0)
    squares = np.where(sizes > 0, pc.fill_null(partials[f"{name}__squares"], 0.0).to_numpy(), 0.0)
    total = np.bincount(groups, sizes, count)
    mean = np.bincount(groups, sizes * means, count) / np.maximum(total, 1)
    spread = np.bincount(groups, squares + sizes * (means - mean[groups]) ** 2, count)
    none = total == 0
    return {
        f"{name}__count": pa.array(total.astype(np.int64)),
        f"{name}__mean": pa.array(mean, mask=none),
        f"{name}__squares": pa.array(spread, mask=none),
    }


def _merged_values(values: pa.ChunkedArray, groups: npt.NDArray[np.int64], count: int) -> pa.Array:
    """Merge sets of values, which lie as lists."""
    lists = values.combine_chunks()
    of_value = groups[pc.list_parent_indices(lists).to_numpy()]
    pairs = pa.table({"group": of_value, "value": lists.flatten()})
    distinct = pairs.group_by(["group", "value"], use_threads=False).aggregate([])
    distinct = distinct.sort_by([("group", "ascending"), ("value", "ascending")])
    sizes = np.bincount(distinct["group"].to_numpy(), minlength=count)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), distinct["value"].combine_chunks(), type=lists.type)


def _one_each(values: pa.ChunkedArray) -> pa.Array:
    """A list of one value for each that is not null."""
    whole = values.combine_chunks()
    valid = pc.is_valid(whole).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(valid, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), whole.drop_null())


def check_columns(rows: pa.Schema, columns: Iterable[str]) -> None:
    """See that rows have these columns."""
    for column in columns:
        if column not in rows.names:
            raise ConfigurationError(f"the stream has no column {column!r}; it has {', '.join(rows.names)}")


def _type_of(rows: pa.Schema, column: str) -> pa.DataType:
    check_columns(rows, [column])
    return rows.field(column).type
