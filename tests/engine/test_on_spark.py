"""Pipelines with steps that only Spark can take, on a real session, against DuckDB over the raw input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from arroyo_dagster import Pipeline, Stream, agg
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import AttemptError, ConfigurationError
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.testing import TableSource
from tests.engine.operators import Recorder, RunningTotal, calls
from tests.engine.oracle import epochs_of, published, take_epochs, windows
from tests.engine.test_pipelines import rows, shown

CUTS = [150, 150, 151, 400]
ROWS = rows(400, seconds=100)
AGGREGATES: dict[str, Any] = {"n": agg.count(), "total": agg.sum("v"), "average": agg.mean("v")}


def add_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index("v"), "v", pc.add(batch["v"], 1))


SHAPES: dict[str, tuple[Callable[[Stream], Stream], str]] = {
    "no steps": (lambda stream: stream, "SELECT * FROM input"),
    "where": (
        lambda stream: stream.where("v > 30 AND k <> 'key 3'"),
        "SELECT * FROM input WHERE v > 30 AND k <> 'key 3'",
    ),
    "select": (
        lambda stream: stream.select("t", "upper(k) AS k", "v * 2 AS v"),
        "SELECT t, upper(k) AS k, v * 2 AS v, epoch FROM input",
    ),
    "with columns": (
        lambda stream: stream.with_columns(v="v % 7", extra="k").where("extra <> 'key 1'"),
        "SELECT k, v % 7 AS v, t, epoch FROM input WHERE k <> 'key 1'",
    ),
    "sql": (
        lambda stream: stream.sql("WITH few AS (SELECT * FROM rows WHERE v < 50) SELECT k, v + 1 AS v, t FROM few").sql(
            "SELECT * FROM rows WHERE v > 5"
        ),
        "SELECT k, v + 1 AS v, t, epoch FROM input WHERE v < 50 AND v + 1 > 5",
    ),
    "functions around": (
        lambda stream: (
            stream.map_batches(add_one).where("v > 10").map_batches(add_one).where("v > 12").map_batches(add_one)
        ),
        "SELECT k, v + 3 AS v, t, epoch FROM input WHERE v + 1 > 10 AND v + 2 > 12",
    ),
    "union of two ways": (
        lambda stream: stream.where("v < 20").union(stream.where("v > 80")),
        "SELECT * FROM input WHERE v < 20 OR v > 80",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_behind_stateless_steps(spark: SparkSession, tmp_path: Path, shape: str) -> None:
    steps, query = SHAPES[shape]
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
    stream = pipeline.source("rows", TableSource(ROWS, CUTS, 2), event_time="t", watermark_delay="4 seconds")
    steps(stream).key_by("k").tumble("10 seconds").aggregate("stats", **AGGREGATES).sink(
        "out", ParquetSink(str(tmp_path / "out"))
    )
    engine = Engine(pipeline, session=lambda: spark)
    taken = take_epochs(engine, len(CUTS))
    numbered = epochs_of(ROWS, CUTS)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        wanted = connection.register("input", numbered).sql(query).to_arrow_table()
    last = max(epoch.manifest.operators[0].watermark or 0 for epoch in taken)
    assert last == pc.max(ROWS["t"].cast(pa.int64())).as_py() - 4_000_000  # rows that are left out tell the time too
    question: dict[str, Any] = {"epochs": len(CUTS), "keys": ["k"], "time": "t", "size": 10, "delay": 4}
    expected = windows(_with_marks(wanted, numbered), **question, aggregates=AGGREGATES)
    assert published(tmp_path / "out", ["k"], list(AGGREGATES)) == [row for row in expected if row[0]] != []
    assert engine.verify() == []


def _with_marks(wanted: pa.Table, everything: pa.Table) -> pa.Table:
    """The wanted rows, and one of no key for each epoch, so that the oracle sees how far time has come."""
    latest = everything.group_by("epoch").aggregate([("t", "max")])
    marks = pa.table(
        {
            "k": pa.nulls(len(latest), pa.string()),
            "v": pa.nulls(len(latest), pa.int64()),
            "t": latest["t_max"],
            "epoch": latest["epoch"],
        }
    )
    return pa.concat_tables([wanted.select(["k", "v", "t", "epoch"]).cast(marks.schema), marks])


def test_state_by_key_and_sinks_of_all_kinds(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
    stream = pipeline.source("rows", TableSource(ROWS, CUTS, 3))
    totals = stream.key_by("k").process("totals", RunningTotal(), schema=pa.schema(
        [("k", pa.string()), ("total", pa.int64()), ("epoch", pa.int64())]
    ))  # fmt: skip
    totals.sink("all", ParquetSink(str(tmp_path / "all")))
    totals.where("total % 2 = 0").sink("even", ParquetSink(str(tmp_path / "even")))
    stream.where("v = 99").sink("top", ParquetSink(str(tmp_path / "top")))
    stream.sink("raw", ParquetSink(str(tmp_path / "raw")))
    take_epochs(Engine(pipeline, session=lambda: spark), len(CUTS))
    last = f"SELECT k, max_by(total, epoch) FROM '{tmp_path}/all/*.parquet' GROUP BY k ORDER BY k"
    with duckdb.connect() as connection:
        connection.register("input", ROWS)
        expected = connection.execute("SELECT k, sum(v) FROM input GROUP BY k ORDER BY k").fetchall()
        assert connection.execute(last).fetchall() == expected
        top = connection.execute("SELECT count(*) FROM input WHERE v = 99").fetchall()
    assert shown(tmp_path / "even") == [row for row in shown(tmp_path / "all") if row[1] % 2 == 0] != []
    assert [(len(shown(tmp_path / "top")),)] == top
    assert len(shown(tmp_path / "raw")) == len(ROWS)


def test_handle_checkpoint_is_called_once_a_subtask_in_other_processes(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=3)
    table = ROWS.select(["k", "t"]).set_column(1, "t", ROWS["t"].cast(pa.timestamp("us")))
    stream = pipeline.source("rows", TableSource(table, [200, 400], 2), event_time="t")
    stream.key_by("k").process("recorder", Recorder(str(tmp_path / "notes"))).sink(
        "out", ParquetSink(str(tmp_path / "out"))
    )
    take_epochs(Engine(pipeline, session=lambda: spark), 2)
    made = [
        (call["epoch"], call["subtask"]) for call in calls(tmp_path / "notes") if call["method"] == "handle_checkpoint"
    ]
    assert sorted(made) == [(epoch, subtask) for epoch in (1, 2) for subtask in range(3)]
    assert len(shown(tmp_path / "out")) == 400


def test_a_join_with_a_small_table_of_sparks(spark: SparkSession, tmp_path: Path) -> None:
    spark.createDataFrame([("key 1", "one"), ("key 2", "two")], "name string, number string").createOrReplaceTempView(
        "dims"
    )
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
    stream = pipeline.source("rows", TableSource(ROWS, CUTS, 2))
    joined = stream.sql("SELECT /*+ BROADCAST(d) */ r.k, d.number FROM rows AS r JOIN dims AS d ON r.k = d.name")
    joined.sink("out", ParquetSink(str(tmp_path / "out")))
    take_epochs(Engine(pipeline, session=lambda: spark), len(CUTS))
    with duckdb.connect() as connection:
        connection.register("input", ROWS)
        number = "CASE k WHEN 'key 1' THEN 'one' ELSE 'two' END"
        query = f"SELECT k, {number} FROM input WHERE k IN ('key 1', 'key 2') ORDER BY ALL"
        assert shown(tmp_path / "out") == connection.execute(query).fetchall() != []


@pytest.mark.parametrize("unit", ["ns", "ms", "s"])
def test_times_of_every_unit_pass_through_sparks_steps(spark: SparkSession, tmp_path: Path, unit: str) -> None:
    times = pa.array([7, 1_500_000_007], pa.int64()).cast(pa.timestamp(unit, None if unit == "ms" else "UTC"))
    table = pa.table({"k": ["a", "b"], "t": times})
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=1)
    pipeline.source("rows", TableSource(table, [2])).where("k <> 'x'").sink("out", ParquetSink(str(tmp_path / "out")))
    take_epochs(Engine(pipeline, session=lambda: spark), 1)
    cut = times.cast(pa.timestamp("us", times.type.tz), safe=False)
    assert shown(tmp_path / "out", "k, epoch_us(t)") == list(zip("ab", cut.cast(pa.int64()).to_pylist(), strict=True))


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("steps", "message"),
        [
            (
                lambda stream: stream.where("nonsense > 1"),
                "stats: Spark cannot do where\\('nonsense > 1'\\) on the rows of rows",
            ),
            (lambda stream: stream.where("v >"), "Spark cannot do where\\('v >'\\)"),
            (
                lambda stream: stream.sql("SELECT k, max(v) AS v, max(t) AS t FROM rows GROUP BY k"),
                "has to see rows together",
            ),
            (lambda stream: stream.sql("SELECT * FROM rows LIMIT 5"), "has to see rows together"),
            (lambda stream: stream.sql("SELECT * FROM rows UNION ALL SELECT * FROM rows"), "has to see rows together"),
            (lambda stream: stream.sql("SELECT a.* FROM rows a JOIN rows b ON a.k = b.k"), "has to see rows together"),
            (
                lambda stream: stream.sql("SELECT * FROM rows WHERE v IN (SELECT v + 3 FROM rows)"),
                "has to see rows together",
            ),
            (lambda stream: stream.where("1 = 0"), "lets no row through"),
            (
                lambda stream: stream.sql("SELECT /*+ BROADCAST(r) */ r.* FROM rows r JOIN range(3) ON v = id"),
                "joins in a way that would send all rows everywhere",
            ),
            (lambda stream: stream.sql("SELECT v, t FROM rows"), "the stream has no column 'k'; it has v, t"),
            (lambda stream: stream.select("k", "v", "CAST(t AS STRING) AS t"), "the event time 't' is string"),
        ],
    )
    def test_is_said_before_anything_is_read(
        self, spark: SparkSession, tmp_path: Path, steps: Callable[[Stream], Stream], message: str
    ) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        stream = pipeline.source("rows", TableSource(ROWS, CUTS), event_time="t")
        steps(stream).key_by("k").tumble("10 seconds").aggregate("stats", n=agg.count(), top=agg.max("v")).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        with pytest.raises(ConfigurationError, match=message):
            take_epochs(Engine(pipeline, session=lambda: spark), 1)

    def test_a_type_that_spark_lacks_is_named_with_its_column(self, spark: SparkSession, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=1)
        table = pa.table({"k": ["a"], "odd": pa.array([None], pa.decimal256(60, 2))})
        pipeline.source("rows", TableSource(table, [1])).where("k = 'a'").sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        with pytest.raises(
            ConfigurationError, match="Spark has no type for the column 'odd' of rows, which is decimal"
        ):
            take_epochs(Engine(pipeline, session=lambda: spark), 1)

    def test_an_error_in_a_task_is_one_sentence(self, spark: SparkSession, tmp_path: Path) -> None:
        def divide(batch: pa.RecordBatch) -> pa.RecordBatch:
            raise ZeroDivisionError("seven by zero")

        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        pipeline.source("rows", TableSource(ROWS, CUTS)).map_batches(divide).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        with pytest.raises(AttemptError) as caught:
            take_epochs(Engine(pipeline, session=lambda: spark), 1)
        assert str(caught.value) == "map_batches(divide) before out raised ZeroDivisionError: seven by zero"
