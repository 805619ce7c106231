"""Run ids for processes outside Dagster, so that one that was killed holds nobody up until the time-out."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from arroyo_dagster.controller import Run, RunKind
from arroyo_dagster.log import PipelineState

_PROC = Path("/proc")
_RUN_ID = re.compile(r"process-(\d{1,9})-(\d+)@(.+)")
_DEAD = frozenset("ZX")


@dataclass(frozen=True, slots=True)
class _Status:
    """What Linux tells of a process: its state, and when it began, in clock ticks since the machine did."""

    state: str
    began: int


def own_run_id() -> str:
    """A run id for this process: its number, when it began, and where. The same for as long as it lives."""
    status = _status(os.getpid())
    return f"process-{os.getpid()}-{status.began if status else 0}@{_place()}"


def _place() -> str:
    """Where numbers of processes are of use: on this host and, in a container, only within that."""
    try:
        return f"{socket.gethostname()}/{os.readlink(_PROC / 'self' / 'ns' / 'pid')}"
    except OSError:
        return socket.gethostname()


def live_runs(state: PipelineState) -> list[Run]:
    """The runs that the state names and that have not ended, as far as this process can tell.

    Of a process elsewhere, and of a run of Dagster, it cannot: they count as alive, until the policy's time-out.
    """
    return [run for run in named_runs(state) if lives(run.run_id)]


def is_process(run_id: str) -> bool:
    """Tell whether a run id is that of a process, and not one of Dagster's."""
    return _RUN_ID.fullmatch(run_id) is not None


def named_runs(state: PipelineState) -> Iterator[Run]:
    """The runs that the state says are at work."""
    if state.in_flight and state.in_flight.started.run_id:
        yield Run(state.in_flight.started.run_id, RunKind.CHECKPOINT, state.in_flight.at)
    if state.sinks and state.sinks.run_id:
        kind = RunKind.REWIND if state.sinks.retract else RunKind.CHECKPOINT
        yield Run(state.sinks.run_id, kind, state.sinks.since)
    if state.cleanup and state.cleanup.run_id:
        yield Run(state.cleanup.run_id, RunKind.CLEANUP, state.cleanup.at)
    for replay in state.replays:
        if replay.started.run_id:
            yield Run(replay.started.run_id, RunKind.REPLAY, replay.at)


def lives(run_id: str) -> bool:
    """Tell whether a process may still be there. One elsewhere always may."""
    parts = _RUN_ID.fullmatch(run_id)
    if parts is None or parts[3] != _place():
        return True
    pid, began = int(parts[1]), int(parts[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    status = _status(pid)
    return status is None or (status.state not in _DEAD and status.began == began)


def _status(pid: int) -> _Status | None:
    """None where there is no /proc, or no such process in it."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, with whatever characters it has.
    fields = text.rpartition(")")[2].split()
    return _Status(fields[0], int(fields[19]))
