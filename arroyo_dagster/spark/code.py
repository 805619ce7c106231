"""Bring our code and the user's to executors that do not have it installed."""

from __future__ import annotations

import hashlib
import io
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

import arroyo_dagster

_shipped: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()


def ship_code(session: SparkSession) -> None:
    """Give the session's tasks this package and every module that is loaded here and not installed.

    An embedded Spark shares our disk and path, and needs nothing. Otherwise it is done again only when
    something has changed.
    """
    if _is_embedded(session):
        return
    archive = _archive()
    digest = hashlib.blake2b(archive, digest_size=8).hexdigest()
    if _shipped.get(session) == digest:
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, f"arroyo_dagster_code_{digest}.zip")
        path.write_bytes(archive)
        session.addArtifacts(str(path), pyfile=True)
    _shipped[session] = digest


def _is_embedded(session: SparkSession) -> bool:
    if not hasattr(session, "_jsparkSession"):
        return False  # Spark Connect
    return (session.conf.get("spark.master") or "").startswith("local")


def _archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(dict(_sources()).items()):
            archive.writestr(zipfile.ZipInfo(name), content)  # without a date, so that the same code is the same file
    return out.getvalue()


def _sources() -> Iterator[tuple[str, bytes]]:
    home = Path(arroyo_dagster.__file__).parent
    for path in home.rglob("*.py"):
        yield f"arroyo_dagster/{path.relative_to(home).as_posix()}", path.read_bytes()
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    for name, module in list(sys.modules.items()):
        source = _source_of(module)
        if source is None or name == "__main__" or any(source.is_relative_to(place) for place in (home, *installed)):
            continue
        place = name.replace(".", "/")
        yield f"{place}/__init__.py" if source.name == "__init__.py" else f"{place}.py", source.read_bytes()


def _source_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    if not file or not str(file).endswith(".py"):
        return None
    path = Path(file).resolve()
    return path if path.is_file() else None
