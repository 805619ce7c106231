"""What a user writes to keep state: an operator, and what it is given to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import Any, overload

import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster.dataflow.tables import GlobalTable, KeyedRows, KeyedTable, TableSpec, TimeRows, TimeTable
from arroyo_dagster.model import CheckpointBarrier


class TableManager(ABC):
    """All tables of one subtask."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Persist what has changed since the last epoch. It is called for you when `handle_checkpoint` says True."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what has changed since the last epoch, so that `handle_checkpoint` may say False."""


class OperatorContext(ABC):
    """What a subtask of an operator works with, for the length of one epoch."""

    operator: str
    subtask_index: int
    parallelism: int
    barrier: CheckpointBarrier
    watermark: DateTime | None
    """Until the barrier, the watermark as the last epoch left it; from `handle_watermark` on, the new one."""
    metrics: MutableMapping[str, int]
    """Counters of your own: they are summed up over the subtasks, and shown with the epoch."""
    table_manager: TableManager

    @abstractmethod
    def collect(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Send rows downstream."""

    @overload
    def table(self, table: TimeTable) -> TimeRows: ...
    @overload
    def table(self, table: KeyedTable | GlobalTable) -> KeyedRows: ...
    @overload
    def table(self, table: str) -> Any: ...
    @abstractmethod
    def table(self, table: TableSpec | str) -> Any:
        """One of the tables that `tables` has declared, by its name or by itself."""


class Operator:
    """A stateful operator. One copy of it runs in every subtask, on a Spark executor.

    In each epoch a new copy is made of what was given to `process`, and its methods are called in the order in which
    they stand here, in a stable order of batches, so that the same input gives the same output. State
    that should live on lies in tables; attributes end with the epoch. When one of the methods raises, the attempt
    fails, nothing of it is committed, and `on_close` is still called.
    """

    def tables(self) -> Sequence[TableSpec]:
        """Declare the state tables. Called on the driver too, when the pipeline is defined."""
        return ()

    def on_start(self, ctx: OperatorContext) -> None:
        """Begin the epoch: the tables are as the parent epoch left them."""

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:  # noqa: A002
        """Take rows of one input."""

    def handle_watermark(self, watermark: DateTime, ctx: OperatorContext) -> DateTime:
        """Learn how far event time has come, once all inputs have delivered the barrier.

        Called once an epoch if the inputs have event time. What it returns is the watermark for those downstream;
        an operator that holds rows back returns an earlier one.
        """
        return watermark

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        """End the epoch, after the barrier has come from every upstream subtask of every input.

        Called once in every subtask. True: the tables are persisted. False: they are not, and the last epoch's state
        stays valid for this subtask; written rows that would be lost by that make the attempt fail,
        unless `ctx.table_manager.discard()` was called first. The barrier goes on downstream either way.
        """
        return True

    def on_close(self, ctx: OperatorContext) -> None:
        """Release what `on_start` has taken. Called last, also after an error."""
