"""What a user might write, in a file that Dagster is pointed at."""

from pathlib import Path

from bidding.cleaning import CLEAN, in_euros  # type: ignore[import-not-found]
from bidding.totals import EMITTED, Failing, Totals  # type: ignore[import-not-found]

from arroyo_dagster import Pipeline, Stream, agg
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.sources import FileSource


def bid_pipeline(directory: Path) -> Pipeline:
    pipeline = Pipeline("bids", state_url="state", parallelism=2)
    bids = _bids(pipeline, directory)
    (
        bids.map_batches(in_euros, CLEAN)
        .where("euros > 2")
        .key_by("auction")
        .tumble("10 seconds")
        .aggregate("stats", bids=agg.count(), top=agg.max("euros"))
        .sink("windows", ParquetSink(str(directory / "windows")))
    )
    totals = bids.key_by("auction").process("totals", Totals(), schema=EMITTED)
    totals.sink("counts", ParquetSink(str(directory / "counts")))
    return pipeline


def failing_pipeline(directory: Path) -> Pipeline:
    pipeline = Pipeline("failing", state_url="state", parallelism=2)
    rows = _bids(pipeline, directory).where("price > 2").key_by("auction").process("broken", Failing())
    rows.sink("nothing", ParquetSink(str(directory / "nothing")))
    return pipeline


def _bids(pipeline: Pipeline, directory: Path) -> Stream:
    source = FileSource(directory / "bids", max_files_per_epoch=2)
    return pipeline.source("bids", source, event_time="date_time", watermark_delay="5 seconds")
