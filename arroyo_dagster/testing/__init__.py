"""What users' tests and ours share."""

from arroyo_dagster.testing.faults import Call, Crash, Fault, FaultyStore, at_call
from arroyo_dagster.testing.harness import InProcessEngine
from arroyo_dagster.testing.sources import TableSource

__all__ = ["Call", "Crash", "Fault", "FaultyStore", "InProcessEngine", "TableSource", "at_call"]
