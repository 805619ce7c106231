"""The code location that Dagster loads, with an example: the highest bid on every auction in each ten seconds."""

import dagster as dg

from arroyo_dagster import Pipeline, Retention, agg
from arroyo_dagster.sinks import DeltaSink
from arroyo_dagster.sources import NexmarkSource

auctions = Pipeline("auctions", checkpoint_interval="30 seconds", retention=Retention(keep_last=20))

bids = auctions.source(
    "bids", NexmarkSource("bid", events_per_second=10_000), event_time="date_time", watermark_delay="5 seconds"
)
(
    bids.where("price > 100")
    .key_by("auction")
    .tumble("10 seconds")
    .aggregate("bid_stats", bids=agg.count(), top_price=agg.max("price"))
    .sink("hot_auctions", DeltaSink("data/hot_auctions"))
)

defs = dg.Definitions()
