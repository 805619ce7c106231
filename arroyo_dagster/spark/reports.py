"""What tasks tell the driver, and the driver the engine: small values that survive JSON and pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arroyo_dagster.model import FileEntry, ObjectPath, OperatorRecord, SourceRecord, Span, StagedOutput, TableFiles
from arroyo_dagster.spark.channels import SenderReport
from arroyo_dagster.state.manager import TableReport


@dataclass(frozen=True, slots=True)
class ExchangeFile:
    """Rows on their way to a later stage, as an Arrow IPC stream."""

    path: ObjectPath
    rows: int
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """What an operator has for later stages. `schema` is Arrow's own, in Base64; None when there were no rows.

    `timed` says that there is event time at all, `idle` that all of the operator's inputs are idle, so that nobody
    should wait for its watermark.
    """

    files: tuple[ExchangeFile, ...]
    schema: str | None
    watermark: int | None
    timed: bool
    idle: bool


@dataclass(frozen=True, slots=True)
class SubtaskReport:
    """What one subtask has done. Watermarks are those before and after the operator has looked at them.

    `outputs` are what the barriers say that each sender has sent altogether, in the order of legs and senders.
    """

    subtask: int
    rows_in: int
    rows_out: int
    skipped: bool
    watermark: int | None
    watermark_out: int | None
    tables: tuple[TableReport, ...]
    staged: tuple[StagedOutput, ...]
    exchange: Exchange
    metrics: Mapping[str, int]
    spans: tuple[Span, ...]
    outputs: tuple[str, ...]
    senders: tuple[SenderReport, ...]


@dataclass(frozen=True, slots=True)
class WriterReport:
    """What one task of a stage without an operator has done."""

    sender: SenderReport
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage has done, ready for the manifest; and `exchange`, for later stages."""

    stage: str
    sources: tuple[SourceRecord, ...]
    operator: OperatorRecord | None
    tables: tuple[TableFiles, ...]
    staged: tuple[StagedOutput, ...]
    exchange: Exchange | None
    spans: tuple[Span, ...]
