"""Exactly-once, stateful, incremental pipelines that run on Spark and are operated from Dagster."""

from arroyo_dagster.controller import CheckpointPolicy
from arroyo_dagster.dataflow import (
    GlobalTable,
    KeyedTable,
    Operator,
    OperatorContext,
    Pipeline,
    Sink,
    Source,
    Stream,
    TimeTable,
    agg,
)
from arroyo_dagster.errors import ArroyoDagsterError
from arroyo_dagster.model import CheckpointBarrier
from arroyo_dagster.retention import Retention

__all__ = [
    "ArroyoDagsterError",
    "CheckpointBarrier",
    "CheckpointPolicy",
    "GlobalTable",
    "KeyedTable",
    "Operator",
    "OperatorContext",
    "Pipeline",
    "Retention",
    "Sink",
    "Source",
    "Stream",
    "TimeTable",
    "agg",
]
