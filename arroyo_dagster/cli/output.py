"""How every command answers: a text or one JSON document, and an exit code."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TypeAlias

import click
from rich.console import Console, RenderableType

from arroyo_dagster.errors import ArroyoDagsterError
from arroyo_dagster.log.codec import encode

_WIDTH_OF_FILES = 140


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found: as JSON and for people. With an error, which may come after some success, it failed."""

    document: Mapping[str, object]
    text: tuple[RenderableType, ...]
    error: Exception | str | None = None


Command: TypeAlias = Callable[..., Answer]


def answering(command: Command) -> Callable[..., None]:
    """Make a command print its answer, and exit with 1 and one sentence if it failed.

    Until it has answered, nothing gets to stdout: what the user's code prints goes to stderr.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document, and nothing else, to stdout.")
    @click.option("--traceback", "with_traceback", is_flag=True, help="Print where an error comes from.")
    @functools.wraps(command)
    def run(as_json: bool, with_traceback: bool, **arguments: object) -> None:
        try:
            with redirect_stdout(sys.stderr):
                answer = command(**arguments)
        except click.ClickException:
            raise
        except KeyboardInterrupt:
            answer = Answer({}, (), "interrupted; the next run carries on from what is in the log")
        except Exception as error:  # whatever it was, a person gets one sentence
            answer = Answer({}, (), error)
        if with_traceback and isinstance(answer.error, Exception):
            traceback.print_exception(answer.error)
        sentence = _sentence(answer.error) if answer.error else None
        if as_json:
            document = {**answer.document, **({"error": sentence} if sentence else {})}
            click.echo(json.dumps(encode(document), indent=2))
        else:
            console = _console()
            for part in answer.text:
                console.print(part, markup=False)
        if sentence:
            click.echo(f"Error: {sentence}", err=True)
            sys.exit(1)

    return run


def _sentence(error: Exception | str) -> str:
    if isinstance(error, str):
        return error
    if isinstance(error, ArroyoDagsterError):
        return " ".join(str(error).split())
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no more is known")
    return f"{type(error).__name__}: {first} (--traceback shows where it comes from)"


def _console() -> Console:
    """A terminal as wide as it is; a file or a pipe as wide as a table with long names needs."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_FILES)
