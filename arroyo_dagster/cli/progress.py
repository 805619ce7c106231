"""What a person sees while epochs are taken or checked, on stderr and only on a terminal."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from arroyo_dagster.engine import Engine
from arroyo_dagster.spark import open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar that goes away when the work is done."""
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


class EpochsProgress:
    """Follows an engine through a number of epochs. `step` is for the engine's `on_step`."""

    def __init__(self, bar: Progress, epochs: int) -> None:
        """Begin with the first epoch."""
        self._bar = bar
        self._epochs = epochs
        self._steps: dict[str, str] = {}
        self._done = 0
        self._task = bar.add_task("looking at the log", total=None)

    def follow(self, engine: Engine) -> None:
        """Learn the steps that an epoch of this engine takes."""
        doing = {
            "planned": "planning",
            "begun": "writing the plan into the log",
            **{f"stage {stage.name}": f"running {stage.name}" for stage in engine.stages},
            "manifest": "writing the manifest",
            "completed": "committing",
            **{f"published {node.name}": f"publishing {node.name}" for node in engine.graph.sinks},
            "sinks committed": "noting that it is published",
        }
        self._steps = doing
        self._bar.update(self._task, total=len(doing) * self._epochs)

    def step(self, name: str) -> None:
        """One step is done: show the one after it."""
        steps = list(self._steps)
        if name not in self._steps:
            return
        after = steps.index(name) + 1
        self._bar.update(self._task, completed=self._done * len(steps) + after)
        if after < len(steps):
            self.say(self._steps[steps[after]])

    def epoch_taken(self) -> None:
        """The next step is the first one of the next epoch."""
        self._done += 1
        if self._done < self._epochs:
            self.say("planning")

    def say(self, what: str) -> None:
        """Say what is being done now."""
        self._bar.update(self._task, description=f"epoch {self._done + 1} of {self._epochs}: {what}")


class LazySession:
    """A Spark that is started when it is first asked for, and once."""

    def __init__(self, master: str | None, remote: str | None, progress: EpochsProgress) -> None:
        """Remember where; nothing is started yet."""
        self._master = master
        self._remote = remote
        self._progress = progress
        self._session: SparkSession | None = None
        self._handler = signal.getsignal(signal.SIGINT)
        self.interrupted = False

    def __call__(self) -> SparkSession:
        """Start Spark, or connect to it; the second time, return what there is."""
        if self._session is None:
            where = (self._remote or self._master or "").split(";")[0]  # a token may follow
            self._progress.say(f"connecting to {where}" if where else "starting Spark")
            signal.signal(signal.SIGINT, self._note_interrupt)
            # Only in the main thread does pyspark take Ctrl-C for itself, and then it prints pages.
            with _stdout_to_stderr(), ThreadPoolExecutor(1) as starter:
                self._session = starter.submit(open_session, master=self._master, remote=self._remote).result()
            signal.signal(signal.SIGINT, self._interrupt)
            if self.interrupted:
                raise KeyboardInterrupt
            self._progress.say("first stage, while Spark warms up")
        return self._session

    def close(self) -> None:
        """Tell a server that this session is over. An embedded Spark ends with the process."""
        signal.signal(signal.SIGINT, self._handler)
        if self._remote and self._session is not None:
            self._session.stop()

    def _note_interrupt(self, *_: object) -> None:
        """Let Spark start before it is ended: a Java whose start pyspark does not see through stays for ever."""
        self.interrupted = True
        self._progress.say("interrupted, ends once Spark has started")

    def _interrupt(self, *_: object) -> None:
        """Stop at once, and in silence.

        Whatever is asking Spark something right now may raise an error of its own in place of this one.
        """
        self.interrupted = True
        logging.disable()
        raise KeyboardInterrupt


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let processes that are started meanwhile write to stderr: whatever Java says, it is no answer of ours."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
