"""Start Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from arroyo_dagster.spark.java import ensure_java

_LOGGING = Path(__file__).parent / "log4j2.properties"


def local_session(cores: int | None = None, config: Mapping[str, str] | None = None) -> SparkSession:
    """Start an embedded Spark, or return the one that this process has. All of its ports are on loopback."""
    ensure_java(os.environ)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    defaults = {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.appName("arroyo_dagster").master(f"local[{cores or '*'}]")
    return builder.config(map={**defaults, **(config or {})}).getOrCreate()
