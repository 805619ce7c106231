"""Operators that tests send rows through."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pendulum import DateTime

from arroyo_dagster import CheckpointBarrier, GlobalTable, KeyedTable, Operator, OperatorContext, TimeTable

TOTALS = KeyedTable("totals", pa.schema([("k", pa.string()), ("total", pa.int64())]), ("k",))


class RunningTotal(Operator):
    """Emits each key's total so far, once an epoch for each key that had rows."""

    def tables(self) -> Sequence[KeyedTable]:
        return (TOTALS,)

    def on_start(self, ctx: OperatorContext) -> None:
        self.batches: list[pa.RecordBatch] = []

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        self.batches.append(batch)
        ctx.metrics["rows seen"] = ctx.metrics.get("rows seen", 0) + batch.num_rows

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        if not self.batches:
            return False
        rows = pa.Table.from_batches(self.batches)
        new = rows.group_by("k", use_threads=False).aggregate([("v", "sum")]).rename_columns(["k", "new"])
        table = ctx.table(TOTALS)
        old = table.get(new.select(["k"]))
        total = pc.add(pc.fill_null(old["total"], 0), pc.fill_null(new["new"], 0))
        totals = pa.table({"k": new["k"], "total": total})
        table.upsert(totals)
        ctx.collect(totals.append_column("epoch", pa.array([barrier.epoch] * len(totals), pa.int64())))
        return True


class Forget(Operator):
    """Passes on the keys of input 0 that it has not seen before; input 1 makes it forget keys."""

    seen = KeyedTable("seen", pa.schema([("k", pa.string())]), ("k",))

    def tables(self) -> Sequence[KeyedTable]:
        return (self.seen,)

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        keys = pa.table({"k": batch.column("k").unique()})
        table = ctx.table(self.seen)
        if input == 1:
            table.delete(keys)
            return
        found = table.get(keys)
        new = found.filter(pc.invert(found["found"])).select(["k"])
        table.upsert(new)
        ctx.collect(new)


class Recorder(Operator):
    """Writes down every call of its methods, and where it came, in one file a process and subtask."""

    def __init__(self, directory: str, answer: bool = True, **faults: str) -> None:
        self.directory = directory
        self.answer = answer
        self.faults = faults

    table = TimeTable("times", pa.schema([("k", pa.string()), ("t", pa.timestamp("us"))]), "t", "1 hour")
    notes = GlobalTable("notes", pa.schema([("name", pa.string()), ("value", pa.int64())]), ("name",))

    def tables(self) -> Sequence[TimeTable | GlobalTable]:
        return (self.table, self.notes)

    def note(self, method: str, ctx: OperatorContext, detail: object = None) -> None:
        entry = {"method": method, "subtask": ctx.subtask_index, "pid": os.getpid(), "epoch": ctx.barrier.epoch}
        line = json.dumps({**entry, "detail": detail})
        with Path(self.directory, f"{ctx.barrier.epoch}-{ctx.subtask_index}-{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\n")
        if self.faults.get(method) == "raise":
            raise ZeroDivisionError(f"in {method}")

    def on_start(self, ctx: OperatorContext) -> None:
        self.note("on_start", ctx, ctx.table(self.table).scan().num_rows)

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        self.note("process_batch", ctx, [input, batch.num_rows])
        if self.faults.get("write") != "no":
            ctx.table(self.table).append(batch)
        ctx.collect(batch)

    def handle_watermark(self, watermark: DateTime, ctx: OperatorContext) -> DateTime:
        self.note("handle_watermark", ctx, watermark.isoformat())
        return watermark

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        self.note("handle_checkpoint", ctx, barrier.epoch)
        if self.faults.get("discard") == "yes":
            ctx.table_manager.discard()
        return self.answer

    def on_close(self, ctx: OperatorContext) -> None:
        self.note("on_close", ctx)


def calls(directory: Path) -> list[dict[str, object]]:
    """All that recorders have written, in order for each subtask."""
    return [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
