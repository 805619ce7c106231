"""The only source of truth: a pipeline's ordered, append-only list of facts, and the state that follows from it."""

from arroyo_dagster.log.log import Appended, Log, Lost, Outcome, Refused
from arroyo_dagster.log.state import Mode, PipelineState
from arroyo_dagster.log.store import Creation, ObjectStorage, Store, open_store

__all__ = [
    "Appended",
    "Creation",
    "Log",
    "Lost",
    "Mode",
    "ObjectStorage",
    "Outcome",
    "PipelineState",
    "Refused",
    "Store",
    "open_store",
]
