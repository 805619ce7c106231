"""The peers that `benchmarks.windowed` compares. Each takes one epoch at a time, so that they can take turns."""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.engine import Engine, Taken
from arroyo_dagster.model import Manifest
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.sources import FileSource

WINDOW = "10 seconds"
WATERMARK_DELAY = "5 seconds"
WINDOW_US, WATERMARK_DELAY_US = 10_000_000, 5_000_000

_STATE = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"rocksdb": f"{_STATE}.RocksDBStateStoreProvider", "default": f"{_STATE}.HDFSBackedStateStoreProvider"}
SESSION = {  # one session for all, with what is good for any of them
    "spark.driver.memory": "6g",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
STREAMING = {
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Counting the rows of the state costs a lookup for each write.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # Closed windows may wait for the next epoch: no second batch for them in this one.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # While another has its turn, a query that waits for files should not look for them a hundred times a second.
    "spark.sql.streaming.pollingDelay": "250ms",
}


@dataclass(frozen=True, slots=True)
class CheckpointShare:
    """Shares of one epoch: `handle_checkpoint` and persisting; and from alignment to durable state, windows and all."""

    checkpoint: float
    aligned_to_durable: float


@dataclass(frozen=True, slots=True)
class Peer:
    """One that is measured.

    `step(epoch)` takes epochs 0, 1, 2, ... and returns the seconds that each took; then come `close` and the rest.
    `lag` says how many epochs after its rows have been seen a window is published.
    """

    step: Callable[[int], float]
    close: Callable[[], None]
    output: Path
    state: Path
    lag: int
    shares: list[CheckpointShare] = field(default_factory=list)


def start_ours(spark: SparkSession, bids: Path, key: str, work: Path, cores: int, files_per_epoch: int) -> Peer:
    """This project, through its public names. An epoch is timed from outside: plan, stages, commit and publishing."""
    pipeline = Pipeline("bench", state_url=str(work / "state"), parallelism=cores)
    source = FileSource(str(bids), max_files_per_epoch=files_per_epoch)
    (
        pipeline.source("bids", source, event_time="date_time", watermark_delay=WATERMARK_DELAY)
        .key_by(key)
        .tumble(WINDOW)
        .aggregate("stats", bids=agg.count(), top=agg.max("price"))
        .sink("out", ParquetSink(str(work / "out")))
    )
    engine = Engine(pipeline, session=lambda: spark)
    shares: list[CheckpointShare] = []

    def step(epoch: int) -> float:
        started = time.perf_counter()
        taken = engine.run_epoch()
        seconds = time.perf_counter() - started
        if not isinstance(taken, Taken):
            raise RuntimeError(f"ours: epoch {epoch} was not taken: {taken}")
        shares.append(checkpoint_share(taken.manifest, seconds))
        return seconds

    return Peer(step, lambda: None, work / "out", work / "state", 0, shares)


def checkpoint_share(manifest: Manifest, seconds: float) -> CheckpointShare:
    """How much of the epoch the slowest subtask's checkpoint was."""
    ends: dict[int, dict[str, int]] = defaultdict(dict)
    micros: dict[int, int] = defaultdict(int)
    for span in manifest.spans:
        ends[span.subtask][span.step] = span.start + span.micros
        micros[span.subtask] += span.micros if span.step in ("handle_checkpoint", "persist") else 0
    durable = max(steps["persist"] - steps["align"] for steps in ends.values() if "persist" in steps)
    return CheckpointShare(max(micros.values()) / seconds / 1e6, durable / seconds / 1e6)


def start_streaming(spark: SparkSession, provider: str, epochs: list[list[Path]], key: str, work: Path) -> Peer:
    """Structured Streaming. The query stays up from epoch to epoch, with its state in memory.

    Its files are put before it two at a time, in one rename, and its own measure of the batch is taken: without the
    time that it waits for files. A batch closes windows by the watermark of the batches before it, hence `lag`.
    """
    arrivals, checkpoint, output = work / "in", work / "checkpoint", work / "out"
    arrivals.mkdir(parents=True)
    for name, value in {**STREAMING, "spark.sql.streaming.stateStore.providerClass": PROVIDERS[provider]}.items():
        spark.conf.set(name, value)  # a query keeps the settings that it was started with
    bids = (
        spark.readStream.schema(spark.read.parquet(str(epochs[0][0])).schema)
        .option("maxFilesPerTrigger", len(epochs[0]))
        .option("recursiveFileLookup", "true")
        .parquet(str(arrivals))
    )
    stats = (
        bids.withWatermark("date_time", WATERMARK_DELAY)
        .groupBy(F.window("date_time", WINDOW), key)
        .agg(F.count("*").alias("bids"), F.max("price").alias("top"))
        .select(
            key, F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end"), "bids", "top"
        )
    )
    query = (
        stats.writeStream.outputMode("append")
        .option("checkpointLocation", str(checkpoint))
        .format("parquet")
        .start(str(output))
    )

    def step(epoch: int) -> float:
        staged = work / f"epoch-{epoch:05}"
        staged.mkdir()
        for path in epochs[epoch]:
            (staged / path.name).symlink_to(path.resolve())
        os.rename(staged, arrivals / staged.name)
        query.processAllAvailable()
        batches = [batch for batch in query.recentProgress if batch["batchId"] == epoch and batch["numInputRows"]]
        if len(batches) != 1:
            raise RuntimeError(f"{provider}: epoch {epoch} was not one micro-batch: {query.recentProgress}")
        return float(batches[0]["durationMs"]["triggerExecution"]) / 1000

    return Peer(step, query.stop, output, checkpoint / "state", 1)


def run_duckdb(bids: list[Path], key: str, output: Path, cores: int) -> float:
    """Everything in one batch, from Parquet to Parquet: the limit of what these cores can do, and the right answer."""
    connection = duckdb.connect(config={"threads": cores})
    started = time.perf_counter()
    connection.execute(
        f"""
        COPY (
            SELECT {key}, make_timestamptz(start) AS window_start, make_timestamptz(start + {WINDOW_US}) AS window_end,
                   count(*) AS bids, max(price) AS top
            FROM (SELECT {key}, price, epoch_us(date_time) // {WINDOW_US} * {WINDOW_US} AS start FROM read_parquet(?))
            GROUP BY {key}, start
        ) TO '{output}' (FORMAT parquet)
        """,  # noqa: S608 - the names are ours
        [[str(path) for path in bids]],
    )
    return time.perf_counter() - started


def bytes_under(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
