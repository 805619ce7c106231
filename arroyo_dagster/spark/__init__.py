"""What runs on Spark."""

from arroyo_dagster.spark.session import local_session, open_session

__all__ = ["local_session", "open_session"]
