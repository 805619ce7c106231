import os
from pathlib import Path

import pyarrow as pa

from arroyo_dagster import CheckpointBarrier, KeyedTable, Operator, OperatorContext

TOTALS = KeyedTable("totals", pa.schema([("auction", pa.int64()), ("bids", pa.int64())]), key=("auction",))
EMITTED = TOTALS.schema.append(pa.field("epoch", pa.int64()))


class Totals(Operator):
    """Count the bids of each auction for ever, and emit every count with every epoch."""

    def tables(self) -> list[KeyedTable]:
        return [TOTALS]

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        table = ctx.table(TOTALS)
        new = pa.table({"auction": batch["auction"]}).group_by("auction").aggregate([([], "count_all")])
        old = table.get(new.select(["auction"]))["bids"].fill_null(0)
        bids = pa.compute.add(new["count_all"], old)
        table.upsert(pa.table({"auction": new["auction"], "bids": bids}, schema=TOTALS.schema))

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        rows = ctx.table(TOTALS).scan()
        ctx.collect(rows.append_column(EMITTED.field("epoch"), pa.array([barrier.epoch] * len(rows), pa.int64())))
        ctx.metrics["checkpoints"] += 1
        ctx.metrics[f"{os.getpid()} {Path.cwd()}"] += 1
        return True


class Failing(Operator):
    """Raises in the middle of things."""

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        raise ValueError("the price\nis wrong")
