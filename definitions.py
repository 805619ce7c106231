"""The code location that Dagster loads: auctions, what is bid on them, and when their price beats all before it."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster import (
    CheckpointBarrier,
    KeyedTable,
    Operator,
    OperatorContext,
    Pipeline,
    Retention,
    agg,
    build_definitions,
)
from arroyo_dagster.sinks import DeltaSink, ParquetSink
from arroyo_dagster.sources import NexmarkSource

BEST = KeyedTable("best", pa.schema([("auction", pa.int64()), ("price", pa.int64())]), key=("auction",))


class PriceRecords(Operator):
    """Tells when an auction's top price is higher than it has ever been before."""

    def tables(self) -> Sequence[KeyedTable]:
        return [BEST]

    def on_start(self, ctx: OperatorContext) -> None:
        self.prices: list[pa.RecordBatch] = []

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        self.prices.append(batch.select(["auction", "top_price"]))

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        if not self.prices:
            return False  # nothing has changed: the last epoch's state stays valid
        tops = pa.Table.from_batches(self.prices).group_by("auction").aggregate([("top_price", "max")])
        tops = tops.rename_columns(["auction", "price"])
        before = ctx.table(BEST).get(tops.select(["auction"]))
        higher = pc.or_kleene(pc.invert(before["found"]), pc.greater(tops["price"], before["price"]))
        records = tops.filter(higher)
        ctx.table(BEST).upsert(records)
        ctx.collect(records)
        ctx.metrics["records"] = records.num_rows
        return True


auctions = Pipeline("auctions", checkpoint_interval="30 seconds", retention=Retention(keep_last=20))

bids = auctions.source(
    "bids", NexmarkSource("bid", events_per_second=10_000), event_time="date_time", watermark_delay="5 seconds"
)
stats = (
    bids.where("price > 100")
    .key_by("auction")
    .tumble("10 seconds")
    .aggregate("bid_stats", bids=agg.count(), top_price=agg.max("price"))
    .sink("hot_auctions", DeltaSink("data/hot_auctions"))
)
stats.key_by("auction").process("price_records", PriceRecords(), schema=BEST.schema).sink(
    "record_prices", ParquetSink("data/record_prices")
)

defs = build_definitions([auctions])
