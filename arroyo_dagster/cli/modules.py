"""Find the pipelines that a module of the user's declares."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from arroyo_dagster.dataflow import Pipeline
from arroyo_dagster.errors import ArroyoDagsterError, ConfigurationError


def pipelines_of(module: str) -> dict[str, Pipeline]:
    """Load a module, by name or by the path of its file, and return every pipeline at its top level, by name."""
    found: dict[str, Pipeline] = {}
    for value in vars(_load(module)).values():
        if isinstance(value, Pipeline) and found.setdefault(value.name, value) is not value:
            raise ConfigurationError(f"{module} has two pipelines named {value.name!r}: rename one")
    return found


def pipeline_of(module: str, name: str) -> Pipeline:
    """The pipeline of that name."""
    pipelines = pipelines_of(module)
    if name not in pipelines:
        there_are = f"it has {', '.join(sorted(pipelines))}" if pipelines else "it has none"
        raise ConfigurationError(f"{module} has no pipeline {name!r} at its top level: {there_are}")
    return pipelines[name]


def _load(module: str) -> ModuleType:
    """Import the module under its own name, from a place on the path: so Spark's tasks can import it too."""
    _put_first(Path.cwd())
    if not module.endswith(".py"):
        return _import(module)
    path = Path(module).resolve()
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}: give --module the name of a module, or the path of one")
    if not path.stem.isidentifier():
        raise ConfigurationError(f"{path} cannot be imported under its name {path.stem!r}: rename it")
    _put_first(path.parent)
    loaded = _import(path.stem)
    if loaded.__file__ is None or Path(loaded.__file__).resolve() != path:
        raise ConfigurationError(f"{path} has the name of another module, {loaded.__file__ or path.stem}: rename it")
    return loaded


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ArroyoDagsterError:
        raise
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{name}.".startswith(f"{error.name}.")
        ):
            raise ConfigurationError(
                f"there is no module {name!r} in {Path.cwd()}: go where it is, or name it with --module"
            ) from error
        raise ConfigurationError(f"the module {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _put_first(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
