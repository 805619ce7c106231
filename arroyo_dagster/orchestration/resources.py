"""What runs are given: a Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SPARK = "arroyo_spark"
"""The key under which runs find it."""


class SparkResource(dg.ConfigurableResource[Any]):
    """Opens the Spark that epochs run on: embedded in the run's process unless it is told of another one."""

    master: str | None = Field(
        default=None,
        description="The master of a Spark cluster, spark://host:7077 or yarn for example. Without it, and without "
        "`remote`, Spark runs inside the run's process, with all cores.",
    )
    remote: str | None = Field(
        default=None,
        description="The address of a Spark Connect server, sc://host:15002/;token=... for example. An address with a "
        'token is a secret: give dg.EnvVar("NAME").',
    )
    config: dict[str, str] = Field(default={}, description="Settings of the Spark session, by name.")

    _opened: Any = PrivateAttr(default=None)

    def session(self) -> SparkSession:
        """Start Spark, or connect to it; the second time, return what there is."""
        from arroyo_dagster.spark import open_session  # noqa: PLC0415 - Spark is loaded when it is needed

        self._opened = open_session(self.master, self.remote, self.config)
        return self._opened  # type: ignore[no-any-return]

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Tell a server that this session is over. An embedded Spark ends with the process."""
        if self.remote and self._opened is not None:
            self._opened.stop()
