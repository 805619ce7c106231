"""Pipelines in Dagster: definitions, sensor, ops and assets, jobs, schedules, checks."""

from arroyo_dagster.orchestration.definitions import build_definitions
from arroyo_dagster.orchestration.resources import SparkResource
from arroyo_dagster.orchestration.translator import AssetNode, Translator

__all__ = ["AssetNode", "SparkResource", "Translator", "build_definitions"]
