"""Errors on their way from a task to a person: one sentence, without the traces of two languages around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from arroyo_dagster import errors
from arroyo_dagster.errors import ArroyoDagsterError, AttemptError

_RAISED_IN_PYTHON = re.compile(
    r"""
    .*\bTraceback\ \(most\ recent\ call\ last\):\n
    (?:[\ \t][^\n]*\n)*          # where
    (?P<kind>\w[\w.]*)           # what
    (?::\ (?P<message>.*?))?     # why: several lines perhaps, until
    \s*
    (?:\n\s*at\ [\w.$/]+\(.*     # the trace in Java,
      |\n\s*SQLSTATE:.*          # or what Spark Connect adds,
    )?\Z                         # or the end
    """,
    re.DOTALL | re.VERBOSE,
)
_RAISED_IN_JAVA = (
    re.compile(r"most recent failure: .*? executor [\w-]+\): (?:[\w.$]+: )?(.+)"),  # of a task
    re.compile(r'^\s*details = "(.+)"$', re.MULTILINE),  # of a call over the network
    re.compile(r"^: (?:[\w.$]+: )?(.+)", re.MULTILINE),  # of a call in Java
    re.compile(r"(\S.*)"),
)


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
        if not is_sparks(error):
            raise
        raise error_of(str(error), f"{what} failed on Spark") from error


def is_sparks(error: Exception) -> bool:
    """Tell whether an error comes from Spark, or from the way there."""
    return type(error).__module__.startswith(("pyspark.", "py4j.", "grpc"))


def error_of(text: str, what: str) -> ArroyoDagsterError:
    """Find the error that a task has raised in what Spark says; an error of others says `what` failed and why."""
    if raised := _RAISED_IN_PYTHON.match(text):
        module, _, name = raised["kind"].rpartition(".")
        message = " ".join((raised["message"] or "").split())
        if module == errors.__name__:
            return getattr(errors, name, AttemptError)(message)
        return AttemptError(f"{what}: {name}: {message}" if message else f"{what}: {name}")
    return AttemptError(f"{what}: {java_cause(text)}")


def java_cause(text: str) -> str:
    """Find the sentence that tells what went wrong in pages of Java."""
    return next((found[1].strip() for pattern in _RAISED_IN_JAVA if (found := pattern.search(text))), "")
