"""Errors on their way from a task to a person: one sentence, without the traces of two languages around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from arroyo_dagster import errors
from arroyo_dagster.errors import ArroyoDagsterError, AttemptError

_OURS = re.compile(r"^(?:.*\.)?errors\.(\w+Error): (.*)$", re.MULTILINE)
_LAST_LINE = re.compile(r"^(\w[\w.]*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Let an error of the user's code say whose it is."""
    try:
        yield
    except ArroyoDagsterError as error:
        raise type(error)(f"{what}: {error}") from error
    except Exception as error:
        raise AttemptError(f"{what} raised {type(error).__name__}: {error}") from error


@contextmanager
def from_tasks(what: str) -> Iterator[None]:
    """Turn what Spark says about a failed task into the error that the task has raised."""
    try:
        yield
    except ArroyoDagsterError:
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.", "grpc")):
            raise
        text = str(error)
        if ours := _OURS.findall(text):
            name, message = ours[-1]
            kind = getattr(errors, name, AttemptError)
            raise kind(message) from error
        lines = _LAST_LINE.findall(text)
        cause = lines[-1] if lines else text.strip().split("\n", 1)[0]
        raise AttemptError(f"{what} failed on Spark: {cause}") from error
