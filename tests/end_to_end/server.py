"""A Dagster server that a test starts, asks over GraphQL, and stops with everything that came of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

# No statistics for anybody, no dialog in front of the pages, and no five seconds in the queue.
_INSTANCE = """
telemetry:
  enabled: false
nux:
  enabled: false
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1
"""

_LOCATIONS = """{ workspaceOrError { ... on Workspace { locationEntries {
    name loadStatus locationOrLoadError { __typename ... on PythonError { message } } } } } }"""


def wait_for(what: str, look: Callable[[], T | None], seconds: float = 60, every: float = 0.5) -> T:
    """Look until there is something to be seen."""
    deadline = time.monotonic() + seconds
    while True:
        if (seen := look()) is not None and seen is not False:
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} seconds")
        time.sleep(every)


class DagsterServer:
    """`dg dev` or `dagster dev` in a project, on loopback, with a Dagster home of its own.

    In a `with` statement it runs from beginning to end; whatever is left of it then is killed.
    """

    def __init__(self, project: Path, home: Path, *command: str, **environ: str) -> None:
        """Nothing is started yet. `environ` is what the processes get besides."""
        self._command = command or ("dg", "dev")
        self.project = project
        self.home = home
        self.output = home.with_name(f"{home.name}.txt")
        self._environ = {**os.environ, **environ, "PYTHONUNBUFFERED": "1", "VIRTUAL_ENV": sys.prefix}
        self._environ["DAGSTER_HOME"] = str(home)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            for process in self.processes():
                os.kill(process, signal.SIGKILL)

    def start(self) -> None:
        """Start it on a free port."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "dagster.yaml").write_text(_INSTANCE)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        program = str(Path(sys.prefix, "bin", self._command[0]))
        # A shell has its background jobs ignore Ctrl-C, and what they start would too.
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)
        with self.output.open("a") as file:
            self._process = subprocess.Popen(
                [program, *self._command[1:], "--host", "127.0.0.1", "--port", str(port)],
                cwd=self.project,
                env=self._environ,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        signal.signal(signal.SIGINT, ours)

    def stop(self) -> None:
        """Press Ctrl-C, and wait until nothing of it is left."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(60)
        self._process = None
        wait_for("the end of all processes", lambda: not self.processes(), every=0.2)

    def processes(self, name: str = "") -> list[int]:
        """Every process that the server, or what it has started, has started; or only those of that name."""
        mark = f"DAGSTER_HOME={self.home}".encode()
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (directory / "environ").read_bytes().split(b"\0")
                if ours and name in {"", (directory / "comm").read_text().strip()}:
                    found.append(int(directory.name))
            except OSError:  # it has just ended, or is another user's
                continue
        return found

    def printed(self) -> str:
        """What one sees in the terminal."""
        return self.output.read_text()

    def location(self) -> dict[str, Any]:
        """The code location, once it is loaded, or could not be."""

        def look() -> dict[str, Any] | None:
            assert self._process is not None
            assert self._process.poll() is None, self.printed()
            try:
                workspace = self.ask(_LOCATIONS)["workspaceOrError"]
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                return None
            return next((entry for entry in workspace["locationEntries"] if entry["loadStatus"] == "LOADED"), None)

        return wait_for("the code location", look, 120)

    def ask(self, query: str, **variables: Any) -> Any:
        """Ask over GraphQL."""
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        assert "errors" not in answer, answer["errors"]
        return answer["data"]
