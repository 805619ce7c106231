"""Code on its way to executors that do not have it."""

import importlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from arroyo_dagster.spark.code import code_files, pack, ship_code


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory, on Python's path for the length of a test."""
    files = {
        "lone.py": "VALUE = 1",
        "boxed/__init__.py": "VALUE = 2",
        "boxed/inner/__init__.py": "",
        "boxed/inner/later.py": "VALUE = 3",
        "boxed/notes.txt": "not code",
        "space/part.py": "VALUE = 4",
        "space/box/__init__.py": "VALUE = 5",
        "space/box/later.py": "VALUE = 6",
        "unused.py": "VALUE = 7",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_loaded_modules_go_and_packages_go_whole(project: Path) -> None:
    for name in ("lone", "boxed", "space.part", "space.box"):
        importlib.import_module(name)
    users = {name for name, path in code_files() if path.is_relative_to(project)}
    assert users == {
        "lone.py",
        "boxed/__init__.py",
        "boxed/inner/__init__.py",
        "boxed/inner/later.py",
        "space/part.py",
        "space/box/__init__.py",
        "space/box/later.py",
    }


def test_our_own_package_goes_and_what_is_installed_does_not() -> None:
    names = {name.split("/")[0] for name, _ in code_files()}
    assert "arroyo_dagster" in names
    assert names.isdisjoint({"pyarrow", "pyspark", "pytest", "json", "_pytest", "__main__.py"})


def test_a_module_is_known_by_its_name_whatever_its_file_is_called(project: Path) -> None:
    spec = importlib.util.spec_from_file_location("by_path", project / "unused.py")
    assert spec is not None
    sys.modules["by_path"] = importlib.util.module_from_spec(spec)
    assert dict(code_files())["by_path.py"] == project / "unused.py"


def test_python_imports_everything_from_the_archive(project: Path) -> None:
    for name in ("lone", "boxed", "space.part", "space.box"):
        importlib.import_module(name)
    archive = project / "code.zip"
    archive.write_bytes(pack(dict(code_files())))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import lone, boxed.inner.later, space.part, space.box.later;"
        "import arroyo_dagster; print(lone.VALUE, boxed.inner.later.VALUE, space.part.VALUE, space.box.later.VALUE,"
        "arroyo_dagster.__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", program, archive], capture_output=True, text=True, check=False, cwd="/"
    )
    assert run.stdout.split() == ["1", "3", "4", "6", f"{archive}/arroyo_dagster/__init__.py"], run.stderr


def test_the_same_code_is_the_same_archive(project: Path) -> None:
    files = {"lone.py": project / "lone.py", "boxed/__init__.py": project / "boxed/__init__.py"}
    first = pack(files)
    (project / "lone.py").touch()
    assert pack(dict(reversed(files.items()))) == first
    (project / "lone.py").write_text("VALUE = 8")
    assert pack(files) != first


def test_folders_are_in_the_archive(project: Path) -> None:
    archive = project / "code.zip"
    archive.write_bytes(pack({"space/box/later.py": project / "lone.py"}))
    assert zipfile.ZipFile(archive).namelist() == ["space/", "space/box/", "space/box/later.py"]


def test_an_embedded_spark_finds_modules_that_were_loaded_after_its_start(spark: SparkSession, project: Path) -> None:
    lone = importlib.import_module("lone")
    ship_code(spark)

    def values(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"value": [lone.VALUE]})

    [row] = spark.range(1).mapInArrow(values, "value long").collect()
    assert row["value"] == 1
