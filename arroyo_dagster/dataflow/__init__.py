"""What a user writes: pipelines, streams, operators; and what sources and sinks must do."""

from arroyo_dagster.dataflow import agg
from arroyo_dagster.dataflow.operator import Operator, OperatorContext
from arroyo_dagster.dataflow.pipeline import Pipeline
from arroyo_dagster.dataflow.sink import Sink, SinkIdentity, StagedWriter
from arroyo_dagster.dataflow.source import Offsets, ReadReport, Source, Split
from arroyo_dagster.dataflow.stream import KeyedStream, Stream, WindowedStream
from arroyo_dagster.dataflow.tables import GlobalTable, KeyedTable, TimeTable

__all__ = [
    "GlobalTable",
    "KeyedStream",
    "KeyedTable",
    "Offsets",
    "Operator",
    "OperatorContext",
    "Pipeline",
    "ReadReport",
    "Sink",
    "SinkIdentity",
    "Source",
    "Split",
    "StagedWriter",
    "Stream",
    "TimeTable",
    "WindowedStream",
    "agg",
]
