"""One pipeline on Spark that dies at every step in turn, and at some moments between, until it has come to its end."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import crashes
from tests.engine.test_crashes import oracle, output
from tests.spark.clusters import connect_server

LAST_STEP = 9
MOMENTS = 4


@pytest.mark.timeout(600)
def test_the_output_is_exactly_right_in_the_end(tmp_path: Path) -> None:
    crashes.write_input(tmp_path / "rows")
    chance = random.Random(7)
    with connect_server(tmp_path, Path(sys.executable)) as remote:
        steps = [live(tmp_path, remote, die_at=step) for step in range(1, LAST_STEP + 1)]
        moments = [live(tmp_path, remote, kill_after=chance.uniform(3, 7)) for _ in range(MOMENTS)]
        end = live(tmp_path, remote)
    assert steps[:3] == [-signal.SIGKILL] * 3  # it must have died at least before, in and behind its first stage
    assert set(steps + moments) <= {-signal.SIGKILL, 0}
    assert end == 0
    assert output(tmp_path) == oracle(tmp_path / "rows")
    assert json.loads((tmp_path / "problems.json").read_text()) == []


def live(directory: Path, remote: str, die_at: int = 0, kill_after: float | None = None) -> int:
    """Live in a process of its own, and tell how that ended."""
    command = [sys.executable, "-m", "tests.engine.crashes", str(directory), remote, str(die_at)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    else:
        assert process.returncode in {0, -signal.SIGKILL}, errors
    return process.returncode
