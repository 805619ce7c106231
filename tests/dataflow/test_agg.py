"""Which aggregates there are of which types, and what they are."""

import pyarrow as pa
import pytest

from arroyo_dagster.dataflow import agg
from arroyo_dagster.dataflow.agg import Aggregate, AggregateKind, plain
from arroyo_dagster.errors import ConfigurationError

NUMBERS = [pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.decimal32(5, 2), pa.decimal256(50, 3)]
ORDERED = [*NUMBERS, pa.bool_(), pa.string(), pa.string_view(), pa.binary(), pa.date32(), pa.time64("us")]
ORDERED += [pa.timestamp("ns", "UTC"), pa.dictionary(pa.int8(), pa.string()), pa.uuid()]
COUNTED = [*ORDERED, pa.duration("s"), pa.month_day_nano_interval()]
NESTED = [pa.list_(pa.int8()), pa.struct([("a", pa.int8())]), pa.map_(pa.string(), pa.int8())]
EVERYTHING = [*COUNTED, pa.null(), *NESTED]

FITTING = {
    AggregateKind.COUNT: EVERYTHING,
    AggregateKind.COUNT_DISTINCT: COUNTED,
    AggregateKind.MIN: ORDERED,
    AggregateKind.MAX: ORDERED,
    AggregateKind.SUM: NUMBERS,
    AggregateKind.MEAN: NUMBERS,
    AggregateKind.STDDEV: NUMBERS,
}


@pytest.mark.parametrize("kind", AggregateKind)
def test_every_kind_fits_its_types_and_no_others(kind: AggregateKind) -> None:
    for column in EVERYTHING:
        if column in FITTING[kind]:
            assert isinstance(Aggregate(kind, "v").result_type(column, "x"), pa.DataType)
        else:
            with pytest.raises(ConfigurationError, match=f"^operator 'x': there is no {kind} of 'v', which is "):
                Aggregate(kind, "v").result_type(column, "operator 'x'")


@pytest.mark.parametrize(
    ("aggregate", "column", "expected"),
    [
        (agg.count(), None, pa.int64()),
        (agg.count("v"), pa.string(), pa.int64()),
        (agg.count_distinct("v"), pa.string(), pa.int64()),
        (agg.sum("v"), pa.int8(), pa.int64()),
        (agg.sum("v"), pa.float32(), pa.float64()),
        (agg.sum("v"), pa.decimal32(5, 2), pa.decimal128(38, 2)),
        (agg.sum("v"), None, None),
        (agg.mean("v"), pa.decimal128(5, 2), pa.float64()),
        (agg.mean("v"), None, pa.float64()),
        (agg.stddev("v"), pa.int64(), pa.float64()),
        (agg.min("v"), pa.date32(), pa.date32()),
        (agg.max("v"), pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("us", "Asia/Tokyo")),
        (agg.max("v"), pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (agg.max("v"), pa.float16(), pa.float32()),
        (agg.max("v"), None, None),
    ],
)
def test_the_type_of_a_result(aggregate: Aggregate, column: pa.DataType | None, expected: pa.DataType | None) -> None:
    assert aggregate.result_type(column, "x") == expected


@pytest.mark.parametrize("kind", EVERYTHING, ids=str)
def test_plain_types_are_plain(kind: pa.DataType) -> None:
    assert plain(plain(kind)) == plain(kind)
