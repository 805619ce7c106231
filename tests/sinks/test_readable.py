"""What the sinks write, read by others.

Neither Spark's nor DuckDB's own Delta reader comes with a Python package for these versions. So both
read the files that the table's log names, and deltalake reads the table itself.
"""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from arroyo_dagster.model import EpochSet
from arroyo_dagster.sinks import DeltaSink, ParquetSink
from tests.sinks.contract import ONE

ROWS: list[dict[str, Any]] = [
    {"value": 1, "at": datetime(2024, 5, 1, 12, tzinfo=UTC), "price": Decimal("1.25"), "tags": ["ü", None]},
    {"value": 2, "at": None, "price": None, "tags": None},
]
SCHEMA = pa.schema(
    {
        "value": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "price": pa.decimal128(20, 2),
        "tags": pa.list_(pa.string()),
    }
)


def test_duckdb_and_spark_read_both(tmp_path: Path, spark: SparkSession) -> None:
    for sink in (ParquetSink(str(tmp_path / "parquet")), DeltaSink(str(tmp_path / "delta"))):
        for epoch, row in enumerate([*ROWS, {**ROWS[0], "value": 3}], 1):
            writer = sink.writer(ONE, epoch, 1, "task")
            writer.write(pa.RecordBatch.from_pylist([row], schema=SCHEMA))
            sink.publish(ONE, epoch, writer.close())
        sink.retract(ONE, EpochSet.of([3]))
        dead = sink.writer(ONE, 4, 1, "dead")
        dead.write(pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA))
        dead.close()

    table = DeltaTable(str(tmp_path / "delta"))
    assert in_order(pa.table(QueryBuilder().register("t", table).execute("select * from t").read_all())) == ROWS

    files = {"parquet": [f"{tmp_path}/parquet/*.parquet"], "delta": table.file_uris()}
    for paths in files.values():
        assert in_order(duckdb.read_parquet(paths).to_arrow_table()) == ROWS

    for paths in ([str(tmp_path / "parquet")], table.file_uris()):
        assert in_order(spark.read.parquet(*paths).toArrow()) == ROWS


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: int(row["value"]))
