"""What users' tests and ours share."""

from arroyo_dagster.testing.faults import Call, Crash, Fault, FaultyStore, at_call

__all__ = ["Call", "Crash", "Fault", "FaultyStore", "at_call"]
