"""A driver in a process of its own: takes the user's pipeline through its epochs, and tells what it has seen as JSON.

Its only argument is JSON too: where Spark is, and where to work.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pendulum
import pyarrow as pa
from pyspark.sql import SparkSession

from arroyo_dagster import ArroyoDagsterError, Pipeline
from arroyo_dagster.engine import Engine, Taken
from arroyo_dagster.spark import open_session

PROJECT = Path(__file__).parent / "project"


def main(master: str | None, remote: str | None, config: dict[str, str], wrong: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {"driver": os.getpid(), "refused": [refused(url) for url in wrong]}
    session = open_session(master, remote, config)
    seen["same"] = open_session(master, remote, config) is session
    seen["other"] = refused("sc://localhost:1" if master else None)
    if master != "local[2]":
        seen["installed"] = has_our_code(session)
    definitions = load_by_path(PROJECT / "bid_pipeline.py")
    seen["operators"] = take_epochs(definitions.bid_pipeline(Path.cwd()), session)
    try:
        take_epochs(definitions.failing_pipeline(Path.cwd()), session)
    except ArroyoDagsterError as error:
        seen["failure"] = [type(error).__name__, str(error)]
    if master:
        seen["java"] = log_as_spark_would(session)
    session.stop()
    return seen


def refused(remote: str | None) -> str:
    """What a person is told who asks for a session there; None is an embedded one."""
    try:
        open_session(remote=remote)
    except ArroyoDagsterError as error:
        return str(error)
    return "nothing was refused"


def has_our_code(session: SparkSession) -> bool:
    """Tell whether a task finds our package when nobody has brought it."""

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            found = importlib.util.find_spec("arroyo_dagster") is not None
            yield pa.RecordBatch.from_pydict({"found": [found]})

    [row] = session.range(1).mapInArrow(look, "found boolean").collect()
    return bool(row["found"])


def log_as_spark_would(session: SparkSession) -> str:
    """Log something for a person and something else; return the version of Java."""
    java: Any = session._jvm
    logger = java.org.apache.logging.log4j.LogManager.getLogger("org.apache.spark.scheduler.TaskSchedulerImpl")
    logger.warn("Initial job has not accepted any resources; see to it")
    logger.error("Lost executor 1, and got another one")
    return str(java.System.getProperty("java.version"))


def load_by_path(path: Path) -> Any:
    """Load a module as `dagster dev -f` does."""
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def take_epochs(pipeline: Pipeline, session: SparkSession) -> list[dict[str, Any]]:
    engine = Engine(pipeline, session=lambda: session)
    policy = replace(pipeline.policy, interval=pendulum.duration(microseconds=1))
    operators = []
    for _ in range(3):
        outcome = engine.run_epoch(policy=policy)
        assert isinstance(outcome, Taken), outcome
        operators += [{"name": record.operator, **record.metrics} for record in outcome.manifest.operators]
    assert engine.verify() == []
    return operators


if __name__ == "__main__":
    json.dump(main(**json.loads(sys.argv[1])), sys.stdout)
