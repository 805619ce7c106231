"""The same engine from a terminal."""

from arroyo_dagster.cli.commands import main

__all__ = ["main"]
