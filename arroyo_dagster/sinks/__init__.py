"""The built-in sinks."""

from arroyo_dagster.sinks.delta import DeltaSink
from arroyo_dagster.sinks.parquet import ParquetSink

__all__ = ["DeltaSink", "ParquetSink"]
