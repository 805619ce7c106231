"""Processes as runs: alive for as long as the very same process is."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arroyo_dagster import processes
from arroyo_dagster.controller import Run, RunKind
from arroyo_dagster.log import PipelineState
from arroyo_dagster.processes import live_runs, own_run_id
from tests.facts import CREATED, NOON, after, cleanup, completed, replay, rewound, started, with_epochs

PRINT_AND_WAIT = "from arroyo_dagster.processes import own_run_id; print(own_run_id(), flush=True); input()"


def taking(run_id: str | None) -> PipelineState:
    """A pipeline whose first epoch is being taken by that run."""
    state = after(PipelineState(), CREATED)
    return after(state, started(state, run_id=run_id))


@pytest.fixture
def process() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        child.kill()


def run_id_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_this_process_lives_and_keeps_its_id() -> None:
    assert own_run_id() == own_run_id()
    assert live_runs(taking(own_run_id())) == [Run(own_run_id(), RunKind.CHECKPOINT, NOON)]


def test_a_process_lives_until_it_is_killed(process: "subprocess.Popen[str]") -> None:
    state = taking(run_id_of(process))
    assert len(live_runs(state)) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert live_runs(state) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells")
def test_a_process_that_nobody_has_waited_for_is_dead_all_the_same(process: "subprocess.Popen[str]") -> None:
    state = taking(run_id_of(process))
    stat = Path(f"/proc/{process.pid}/stat")
    process.send_signal(signal.SIGKILL)
    while ") Z " not in stat.read_text():
        pass
    assert live_runs(state) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells")
def test_another_process_with_the_same_number_is_another() -> None:
    process, _, place = own_run_id().partition("@")
    name, began = process.rsplit("-", 1)
    assert live_runs(taking(f"{name}-{int(began) - 1}@{place}")) == []


def test_what_cannot_be_known_counts_as_alive() -> None:
    elsewhere = "process-1-1@another-host"
    in_a_container = f"process-1-1@{socket.gethostname()}/pid:[1]"
    of_dagster = "3f2a8a55-64b0-4a4c-9d1c-3d3c1a6c0b57"
    assert [run.run_id for run in live_runs(taking(elsewhere))] == [elsewhere]
    assert [run.run_id for run in live_runs(taking(in_a_container))] == [in_a_container]
    assert [run.run_id for run in live_runs(taking(of_dagster))] == [of_dagster]


def test_without_proc_the_number_must_do(
    process: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_id_of(process)
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    state = taking(f"process-{process.pid}-0@{socket.gethostname()}")
    assert "-0@" in own_run_id()
    assert len(live_runs(state)) == 1
    process.kill()
    process.wait()
    assert live_runs(state) == []


def test_every_kind_of_work_names_its_run() -> None:
    done = with_epochs(2)
    publishing = after(done, started(done, run_id="a"))
    publishing = after(publishing, completed(publishing))
    assert live_runs(publishing) == [Run("a", RunKind.CHECKPOINT, NOON)]
    assert live_runs(after(done, rewound(done, 1, "b"))) == [Run("b", RunKind.REWIND, NOON)]
    assert live_runs(after(done, cleanup(done, 1, run_id="c"))) == [Run("c", RunKind.CLEANUP, NOON)]
    assert live_runs(after(done, replay(done, 2, "d"))) == [Run("d", RunKind.REPLAY, NOON)]


def test_work_without_a_run_is_nobodys() -> None:
    assert live_runs(taking(None)) == []
    assert live_runs(PipelineState()) == []
