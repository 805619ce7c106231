"""Bring our code and the user's to executors that do not have it installed."""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import shutil
import site
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from weakref import WeakKeyDictionary

import pyspark
from pyspark.sql import SparkSession

import arroyo_dagster
from arroyo_dagster.spark.session import is_embedded

_shipped: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()


def ship_code(session: SparkSession) -> None:
    """Give the session's tasks this package, and every module that is loaded here and not installed.

    Of a package all modules go, so that a task may import those that are not loaded yet. Only Python source goes:
    other files should lie on storage. An embedded Spark sees our disk, and only has to know where to look.
    It is done again when something has changed.
    """
    if hasattr(session, "_jsparkSession") and is_embedded(session.conf.get("spark.master") or ""):
        _extend_path(session)
        return
    files = dict(code_files())
    state = repr([(name, path, path.stat().st_mtime_ns) for name, path in sorted(files.items())])
    if _shipped.get(session) == state:
        return
    archive = pack(files)
    path = _directory() / f"arroyo_dagster_code_{hashlib.blake2b(archive, digest_size=8).hexdigest()}.zip"
    path.write_bytes(archive)
    before = list(sys.path)
    session.addArtifacts(str(path), pyfile=True)
    sys.path[:] = before  # pyspark adds the archive, which is for others
    _shipped[session] = state


@dataclass(frozen=True, slots=True)
class Root:
    """A module or package that is loaded and not installed, and whose parent, if any, is a namespace."""

    name: str
    source: Path

    def files(self) -> Iterator[tuple[str, Path]]:
        """The modules, by their place below a directory of Python's path."""
        place = PurePosixPath(*self.name.split("."))
        if self.source.name != "__init__.py":
            yield f"{place}.py", self.source
            return
        for path in self.source.parent.rglob("*.py"):
            yield str(place / path.relative_to(self.source.parent).as_posix()), path

    @property
    def import_path(self) -> Path:
        """The directory from which the module would be found under its name, if it is called like its file."""
        depth = self.name.count(".") + (self.source.name == "__init__.py")
        return self.source.parents[depth]


def code_files() -> Iterator[tuple[str, Path]]:
    """What executors need, by its place in the archive."""
    ours = Root("arroyo_dagster", Path(arroyo_dagster.__file__))
    for root in (*_loaded_roots(), ours):
        yield from root.files()


def pack(files: Mapping[str, Path]) -> bytes:
    """Put modules into an archive that Python can import from. The same files give the same bytes."""
    contents = {f"{folder}/": b"" for name in files for folder in PurePosixPath(name).parents if folder.name}
    contents |= {name: path.read_bytes() for name, path in files.items()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):  # folders count: without them, Python finds no namespace packages
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _loaded_roots() -> Iterator[Root]:
    modules = dict(sys.modules)
    for name, module in modules.items():
        file = getattr(module, "__file__", None)
        if name == "__main__" or not file or not str(file).endswith(".py"):
            continue
        parent = modules.get(name.rpartition(".")[0])
        if getattr(parent, "__file__", None):
            continue  # it goes with its package
        source = os.path.abspath(file)
        if not source.startswith(_installed()) and os.path.isfile(source):
            yield Root(name, Path(source))


@cache
def _installed() -> tuple[str, ...]:
    """How the paths of modules begin that executors are expected to have themselves."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [*map(sysconfig.get_path, kinds), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.join(place, "") for place in (*places, str(Path(pyspark.__file__).parents[1])))


def _extend_path(session: SparkSession) -> None:
    environment = session.sparkContext.environment
    known = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    wanted = [str(root.import_path) for root in _loaded_roots()]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*known, *wanted]))


@cache
def _directory() -> Path:
    """A place that lasts as long as this process: executors that start later fetch the archive from here."""
    path = Path(tempfile.mkdtemp(prefix="arroyo_dagster-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
