"""Start Spark servers for tests: on loopback, on ports that are free, with an executors' Python that lacks our code."""

import os
import re
import secrets
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pyspark

from arroyo_dagster.spark.java import ensure_java

_SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_PATIENCE = 120.0
# These live for a minute: starting soon counts for more than running fast.
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Server:
    """A Java process of Spark's, and what it has written."""

    def __init__(self, log: Path, python: Path, *arguments: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PY"))}
        ensure_java(environ)
        environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(python), "SPARK_NO_DAEMONIZE": "1"}
        environ |= {"SPARK_DAEMON_JAVA_OPTS": QUICK_START, "SPARK_DAEMON_MEMORY": "512m"}
        self._log = log
        with log.open("wb") as out:
            # The program replaces itself by Java, so that its id is Java's.
            self._process = subprocess.Popen(
                [_SPARK_CLASS, *arguments], env=environ, cwd=log.parent, stdout=out, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if error is not None:
            error.add_note(f"{self._log} ends with:\n{self._output()[-4000:]}")

    def wait_for(self, pattern: str) -> str:
        """What the first group of the pattern is in a line of the log, once it is there."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self._process.poll() is None:
            if found := re.search(pattern, self._output()):
                return found[1]
            time.sleep(0.2)
        raise AssertionError(f"{self._log} has no {pattern!r}")

    def _output(self) -> str:
        return self._log.read_text(errors="replace")


@contextmanager
def connect_server(directory: Path, python: Path) -> Iterator[str]:
    """The address of a Spark Connect server with two cores that wants a token."""
    token = secrets.token_hex(16)
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.authenticate.token": token,
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": QUICK_START,
    }
    options = [f"--conf={name}={value}" for name, value in settings.items()]
    program = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal")
    submit = "org.apache.spark.deploy.SparkSubmit"
    with Server(directory / "connect.log", python, submit, *options, *program) as server:
        port = server.wait_for(r"Spark Connect server started at: \S*:(\d+)")
        yield f"sc://localhost:{port}/;token={token}"


@contextmanager
def cluster(directory: Path, python: Path) -> Iterator[str]:
    """The address of the master of a cluster of two workers, `one` and `two`, with one core each."""
    place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    share = ("--cores", "1", "--memory", "1g")
    with ExitStack() as stack:
        server = Server(directory / "master.log", python, "org.apache.spark.deploy.master.Master", *place)
        master = stack.enter_context(server).wait_for(r"Starting Spark master at (spark://\S+)")
        workers = []
        for name in ("one", "two"):
            own = (*place, *share, "--work-dir", str(directory / name), master)
            server = Server(directory / f"{name}.log", python, "org.apache.spark.deploy.worker.Worker", *own)
            workers.append(stack.enter_context(server))
        for worker in workers:
            worker.wait_for(r"(Successfully registered with master)")
        yield master


def bare_python(directory: Path) -> Path:
    """A Python that has everything that is installed here, but not what is only linked: our own package."""
    home = directory / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    paths = {"base": str(home), "platbase": str(home)}
    # A file like this one is not looked for in the directories that it names.
    Path(sysconfig.get_path("purelib", "venv", paths), "installed.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "python"
