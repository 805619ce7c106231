"""Start Spark, or connect to one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGGING = Path(__file__).parent / "log4j2.properties"

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Channels are partitions: nobody may put them together, or wonder how many there should be.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200000",
}


def open_session(
    master: str | None = None, remote: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session: of Spark Connect at `remote`, of the cluster at `master`, or embedded with all cores.

    The address of a server that wants a token must name `localhost`, if that is where it is: sc://localhost:15002.
    """
    if master and remote:
        raise ConfigurationError("a Spark session has a master or a remote address, not both")
    if remote:
        return _connect(remote, config or {})
    ensure_java(os.environ)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    local = {}
    if master is None or master.startswith("local"):
        # Python workers see the modules that this process sees, wherever it was started.
        paths = [str(Path(path).absolute()) for path in sys.path if path and not path.endswith(".zip")]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    defaults = {
        **_SETTINGS,
        **local,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it must see the environment as it is now

    builder = SparkSession.builder.appName("arroyo_dagster").master(master or "local[*]")
    return builder.config(map={**defaults, **(config or {})}).getOrCreate()


def local_session(cores: int | None = None, config: Mapping[str, str] | None = None) -> SparkSession:
    """Start an embedded Spark, or return the one that this process has. All of its ports are on loopback."""
    return open_session(f"local[{cores or '*'}]", config=config)


def _connect(remote: str, config: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it is loaded when it is needed

    session: SparkSession = SparkSession.builder.remote(remote).create()
    for name, value in {**_SETTINGS, **config}.items():
        session.conf.set(name, value)
    return session
