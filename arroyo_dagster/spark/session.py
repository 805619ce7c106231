"""Start Spark, or connect to one."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.spark.failures import is_sparks, java_cause
from arroyo_dagster.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGGING = Path(__file__).parent / "log4j2.properties"
_PATIENCE = 20.0  # seconds for a server to answer
_OPTIONS = "spark.driver.extraJavaOptions"
_PYTHON = "spark.pyspark.python"

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Channels are partitions: nobody may put them together, or wonder how many there should be.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200000",
}

_MASTERS = re.compile(r"local(\[(\d+|\*)(, *\d+)?\])?|local-cluster\[.+\]|yarn|(spark|k8s)://.+")

# pyspark's types do not know that a session of Spark Connect is one of their own.
_connected: dict[str, Any] = {}


def open_session(
    master: str | None = None, remote: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session: of Spark Connect at `remote`, of the cluster at `master`, or embedded with all cores.

    A process has one Spark: asked for the same again, it returns the same session, and asked for another, it raises.
    The address of a server that wants a token must name `localhost`, if that is where it is: sc://localhost:15002.
    The Python of a cluster's executors is this one, unless PYSPARK_PYTHON or the setting spark.pyspark.python
    tells where they have theirs.
    """
    if master and remote:
        raise ConfigurationError("a Spark session has a master or a remote address, not both")
    if remote:
        return _connect(remote, config or {})
    return _start(master or "local[*]", config or {})


def local_session(cores: int | None = None, config: Mapping[str, str] | None = None) -> SparkSession:
    """Start an embedded Spark, or return the one that this process has. All of its ports are on loopback."""
    return open_session(f"local[{cores or '*'}]", config=config)


def is_embedded(master: str) -> bool:
    """Tell whether a master's tasks run on this machine, as children of this process."""
    return master == "local" or master.startswith("local[")


def _start(master: str, config: Mapping[str, str]) -> SparkSession:
    _check_master(master)
    _check_alone(master)
    settings: dict[str, str | bool | float | None]
    settings = {**_SETTINGS, "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if is_embedded(master):
        # Python workers see the modules that this process sees, wherever it was started.
        paths = [str(Path(path).absolute()) for path in sys.path if path and not path.endswith(".zip")]
        settings["spark.executorEnv.PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    ensure_java(os.environ)
    python = config.get(_PYTHON) or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    quietly = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
    settings |= {**config, _OPTIONS: f"{quietly} {config.get(_OPTIONS, '')}".strip()}
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it must see the environment as it is now

    with _explained(f"Spark does not start on {master}"):
        return SparkSession.builder.appName("arroyo_dagster").master(master).config(map=settings).getOrCreate()


def _connect(remote: str, config: Mapping[str, str]) -> SparkSession:
    where = _without_token(remote)
    session: Any = _connected.get(remote)
    if session is None or session.is_stopped:
        _check_server(remote, where)
        from pyspark.sql import SparkSession  # noqa: PLC0415 - it is loaded when it is needed

        session = SparkSession.builder.remote(remote).create()
    try:
        with _explained(f"{where} refuses the session"):
            for name, value in {**_SETTINGS, **config}.items():
                session.conf.set(name, value)
    except ConfigurationError:
        session.stop()
        raise
    _connected[remote] = session
    return cast("SparkSession", session)


def _check_alone(wanted: str) -> None:
    """Refuse a second Spark of another kind: pyspark would return the first, or mix them up."""
    from pyspark import SparkContext  # noqa: PLC0415 - it is loaded when it is needed

    active = SparkContext._active_spark_context
    live = [_without_token(remote) for remote, session in _connected.items() if not session.is_stopped]
    if active is not None:
        live.append(str(active.master))
    for other in live:
        if other != wanted and not (is_embedded(other) and is_embedded(wanted)):
            raise ConfigurationError(
                f"this process has a Spark session on {other}, and cannot have one on {wanted} besides: "
                "stop the first one, or take another process"
            )
    if not live:
        os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)  # pyspark leaves it behind when a session has ended


def _check_master(master: str) -> None:
    """Ask a standalone cluster for a sign of life; Spark itself would try for a minute, and then say a lot."""
    if not _MASTERS.fullmatch(master):
        raise ConfigurationError(f"{master!r} is no Spark master: take local[2], spark://host:7077, yarn or k8s://...")
    if not master.startswith("spark://"):
        return
    causes = []
    for address in master.removeprefix("spark://").split(","):
        parts = urlsplit(f"//{address}")
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 7077), _PATIENCE):
                return
        except (OSError, ValueError) as error:
            causes.append(str(error))
    raise ConfigurationError(f"no Spark master answers at {master}: {'; '.join(causes)}")


def _check_server(remote: str, where: str) -> None:
    """Ask a Spark Connect server for a sign of life, if we may; pyspark itself would try for ten minutes."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc  # type: ignore[import-untyped]  # noqa: PLC0415 - it is loaded when it is needed
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql.connect.client import DefaultChannelBuilder  # noqa: PLC0415

    try:
        builder = DefaultChannelBuilder(remote if urlsplit(where).hostname else "")
    except (PySparkException, ValueError):
        # Not their words, which may quote the token.
        raise ConfigurationError(
            f"{where} is no address of a Spark Connect server: it should look like sc://host:15002/;token=secret"
        ) from None
    _check_alone(where)
    states: Queue[grpc.ChannelConnectivity] = Queue()
    state, deadline = None, time.monotonic() + _PATIENCE
    with builder.toChannel() as channel:
        channel.subscribe(states.put, try_to_connect=True)
        while state not in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
            try:
                state = states.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
    if state is not grpc.ChannelConnectivity.READY:
        hint = ""
        if builder.secure and builder.host != "localhost":
            hint = "; with a token, an address means TLS, unless the host is called localhost"
        raise ConfigurationError(f"no Spark Connect server answers at {where}{hint}")


def _without_token(remote: str) -> str:
    return remote.split(";", 1)[0].removesuffix("/")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say in a sentence what pyspark says in pages."""
    try:
        yield
    except Exception as error:
        if not is_sparks(error):
            raise
        raise ConfigurationError(f"{what}: {java_cause(str(error))}") from error
