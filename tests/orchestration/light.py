"""A pipeline that a process can define without loading Spark."""

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.sources import NexmarkSource


def pipeline(directory: str) -> Pipeline:
    light = Pipeline("light", state_url=f"{directory}/state", checkpoint_interval="1 second", parallelism=2)
    bids = light.source("bids", NexmarkSource("bid", events_per_second=10), event_time="date_time")
    stats = bids.key_by("auction").tumble("10 seconds").aggregate("stats", bids=agg.count())
    stats.sink("out", ParquetSink(f"{directory}/out"))
    return light
