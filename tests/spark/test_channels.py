"""Channels on real Spark: whatever is lost, doubled or mixed up on the way is found out, and nothing is committed."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession, functions

from arroyo_dagster import Pipeline
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.spark.job import run_stage
from arroyo_dagster.spark.plans import StageContext
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.oracle import count_and_max, take_epochs

ROWS = pa.table(
    {
        "k": [number % 7 for number in range(100)],
        "v": list(range(100)),
        "t": pa.array([number * 500_000 for number in range(100)], pa.timestamp("us")),
    }
)


def lose_a_batch(messages: DataFrame) -> DataFrame:
    return messages.filter("NOT (kind = 0 AND sender = 1 AND subtask = 0)")


def lose_a_barrier(messages: DataFrame) -> DataFrame:
    return messages.filter("NOT (kind = 1 AND sender = 0 AND subtask = 1)")


def double_a_batch(messages: DataFrame) -> DataFrame:
    return messages.union(messages.filter("kind = 0 AND sender = 0 AND subtask = 1"))


def double_a_barrier(messages: DataFrame) -> DataFrame:
    return messages.union(messages.filter("kind = 1 AND sender = 0 AND subtask = 1"))


def change_the_epoch(messages: DataFrame) -> DataFrame:
    earlier = "CAST(replace(CAST(payload AS STRING), '\"epoch\": 1', '\"epoch\": 7') AS BINARY)"
    return messages.withColumn(
        "payload", functions.expr(f"CASE WHEN kind = 1 AND sender = 1 THEN {earlier} ELSE payload END")
    )


def come_from_nowhere(messages: DataFrame) -> DataFrame:
    return messages.withColumn("sender", functions.expr("CASE WHEN sender = 1 THEN 9 ELSE sender END"))


class Disturbed(Engine):
    """An engine with noise on its channels."""

    noise: Callable[[DataFrame], DataFrame]

    def _execute(self, context: StageContext) -> StageReport:
        return run_stage(self._session(), context, self.noise)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (lose_a_batch, r"from rows\[1\] to stats\[0\] has delivered 0 rows in 0 batches, where \d+ rows in 1 batches"),
        (lose_a_barrier, r"from rows\[0\] to stats\[1\] has delivered no barrier"),
        (double_a_batch, r"from rows\[0\] to stats\[1\] has delivered batch 0 twice"),
        (double_a_barrier, r"from rows\[0\] to stats\[1\] has delivered its barrier twice"),
        (
            change_the_epoch,
            r"from rows\[1\] to stats\[\d\] has delivered the barrier of epoch 7, attempt 1, in epoch 1",
        ),
        (come_from_nowhere, r"from rows\[9\] to stats\[\d\] is none that this epoch has"),
    ],
)
def test_a_disturbed_channel_is_named_and_nothing_is_committed(
    spark: SparkSession, tmp_path: Path, noise: Callable[[DataFrame], DataFrame], message: str
) -> None:
    engine = Disturbed(pipeline(tmp_path), session=lambda: spark)
    engine.noise = noise
    with pytest.raises(AttemptError, match=message):
        take_epochs(engine, 1)
    state = engine.state()
    assert (state.head, state.in_flight, state.sinks) == (0, None, None)
    assert not list(tmp_path.glob("out/*.parquet"))


def test_undisturbed_the_result_is_the_same_with_and_without_spark(spark: SparkSession, tmp_path: Path) -> None:
    digests = []
    for name, engine_type in (("spark", Engine), ("here", InProcessEngine)):
        engine = engine_type(pipeline(tmp_path / name), session=lambda: spark)
        taken = take_epochs(engine, 2)
        digests.append(
            [sorted(file.digest for file in epoch.manifest.files) for epoch in taken]
            + [sorted(file.digest for output in epoch.manifest.staged for file in output.files) for epoch in taken]
        )
    assert digests[0] == digests[1]
    assert all(digests[0][:3])


def pipeline(tmp_path: Path) -> Pipeline:
    made = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
    rows = made.source("rows", TableSource(ROWS, [60, 100], 2), event_time="t")
    count_and_max(made, rows, ParquetSink(str(tmp_path / "out")))
    return made
