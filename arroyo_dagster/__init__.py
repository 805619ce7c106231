"""Exactly-once, stateful, incremental pipelines that run on Spark and are operated from Dagster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from arroyo_dagster.orchestration import AssetNode, SparkResource, Translator, build_definitions

__all__ = [
    "ArroyoDagsterError",
    "AssetNode",
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
    "SparkResource",
    "Stream",
    "TimeTable",
    "Translator",
    "agg",
    "build_definitions",
]


def __getattr__(name: str) -> Any:
    """Load Dagster when it is first asked for: executors and the command line do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("arroyo_dagster.orchestration"), name)
