"""Parts of a pipeline that fail or meddle when they are told to. What they are told lies in files, for tasks to see."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from arroyo_dagster import OperatorContext
from arroyo_dagster.dataflow import SinkIdentity, Split
from arroyo_dagster.model import FileEntry, JsonValue
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.testing import TableSource
from tests.engine.operators import RunningTotal


class FragileTotal(RunningTotal):
    """Fails in its tasks for as long as a file is there."""

    def __init__(self, flag: Path) -> None:
        self.flag = str(flag)

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        if Path(self.flag).exists():
            raise ZeroDivisionError("as it was told")
        super().process_batch(batch, ctx, input)


class FragileSink(ParquetSink):
    """Cannot publish for as long as a file is there."""

    def __init__(self, url: str, flag: Path) -> None:
        super().__init__(url)
        self.flag = str(flag)

    def publish(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> None:
        if Path(self.flag).exists():
            raise OSError("the warehouse is closed")
        super().publish(identity, epoch, files)


MEDDLERS: dict[str, Callable[[], None]] = {}
"""What is to happen once, by name, between the planning of an epoch and its first stage."""


class MeddledSource(TableSource):
    """Lets something happen on the driver, when a stage first asks what there is to read."""

    meddler = ""

    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        if meddle := MEDDLERS.pop(self.meddler, None):
            meddle()
        return super().splits(start, end)
