"""How every command answers: a text or one JSON document, and an exit code."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TypeAlias

import click
from rich.console import Console, RenderableType

from arroyo_dagster.errors import ArroyoDagsterError
from arroyo_dagster.log.codec import encode

_WIDTH_OF_FILES = 140
_WIDEST = 1000


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
            _print(answer.text)
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


def _print(parts: Sequence[RenderableType]) -> None:
    """Print as wide as the terminal is. No number is cut off, though: a table may need more."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else _WIDTH_OF_FILES
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        else:
            needed = console.measure(part, options=console.options.update(max_width=_WIDEST)).minimum
            Console(highlight=False, width=max(width, needed)).print(part, crop=False)
