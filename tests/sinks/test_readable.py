"""What the sinks write, read by others.

DuckDB and deltalake read the Delta table by themselves. No Python package has Spark's Delta reader for this
Spark, so Spark reads the files that the table's log names.
"""

from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import files
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

    with duckdb.connect() as connection:
        connection.load_extension(str(delta_extension()))
        for function in (f"read_parquet('{tmp_path}/parquet/*.parquet')", f"delta_scan('{tmp_path}/delta')"):
            assert in_order(connection.sql(f"from {function}").to_arrow_table()) == ROWS

    for paths in ([str(tmp_path / "parquet")], table.file_uris()):
        assert in_order(spark.read.parquet(*paths).toArrow()) == ROWS


def delta_extension() -> Path:
    """DuckDB's Delta reader, to be loaded from where its package has it: nothing is installed in the home directory."""
    [path] = [file for file in files("duckdb-extension-delta") or () if file.suffix == ".duckdb_extension"]
    return Path(str(path.locate()))


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: int(row["value"]))
