"""One pipeline of a user's on every kind of Spark: embedded, behind Spark Connect, on a cluster."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.spark import local_session, open_session
from tests.spark.clusters import QUICK_START, bare_python, cluster, connect_server

DRIVER = Path(__file__).parent / "drive.py"
KINDS = ["embedded", "connect", "cluster"]


@dataclass(frozen=True)
class Run:
    """A driver's life: where it worked, what it has told, and what it has printed besides."""

    directory: Path
    seen: dict[str, Any]
    stderr: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    return Runs(tmp_path_factory.mktemp("sessions"))


class Runs:
    """Runs the driver on each kind of Spark, once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._done: dict[str, Run] = {}

    def __getitem__(self, kind: str) -> Run:
        if kind not in self._done:
            self._done[kind] = getattr(self, f"_{kind}")()
        return self._done[kind]

    def _embedded(self) -> Run:
        """Where there is no Java, and nothing was activated."""
        work = self._work("embedded")
        environ = {name: value for name, value in os.environ.items() if name not in {"JAVA_HOME", "VIRTUAL_ENV"}}
        environ["PATH"] = path_without_java(self._directory / "bin")
        return _drive(work, environ, master="local[2]", config={"spark.driver.extraJavaOptions": QUICK_START})

    def _connect(self) -> Run:
        work = self._work("connect")
        with connect_server(self._directory, self._python()) as url:
            where = url.split(";")[0]
            wrong = [f"{where};token=geheim", url.replace("localhost", "127.0.0.1"), "sc://localhost:1/;token=geheim"]
            return _drive(work, os.environ, remote=url, wrong=wrong)

    def _cluster(self) -> Run:
        work, python = self._work("cluster"), self._python()
        with cluster(self._directory, python) as master:
            config = {
                "spark.pyspark.python": str(python),
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.extraJavaOptions": QUICK_START,
                "spark.executor.extraJavaOptions": QUICK_START,
                "spark.executor.memory": "512m",
                "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            }
            return _drive(work, os.environ, master=master, config=config)

    def _work(self, kind: str) -> Path:
        work = self._directory / kind
        (work / "bids").mkdir(parents=True)
        random = np.random.default_rng(1)
        for number in range(6):
            start = 1_700_000_000_000_000 + number * 20_000_000
            rows = {
                "auction": random.integers(0, 50, 2000),
                "price": random.integers(0, 1000, 2000),
                "date_time": pa.array(start + random.integers(0, 20_000_000, 2000)).cast(pa.timestamp("us", "UTC")),
            }
            pq.write_table(pa.table(rows), work / "bids" / f"{number}.parquet")
        return work

    def _python(self) -> Path:
        home = self._directory / "python"
        return home / "bin" / "python" if home.exists() else bare_python(self._directory)


def _drive(
    work: Path,
    environ: Any,
    master: str | None = None,
    remote: str | None = None,
    config: dict[str, str] | None = None,
    wrong: list[str] | None = None,
) -> Run:
    inherited = {name: value for name, value in environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    asked = {"master": master, "remote": remote, "config": config or {}, "wrong": wrong or []}
    run = subprocess.run(
        [sys.executable, "-W", "error", DRIVER, json.dumps(asked)],
        env=inherited,
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return Run(work, json.loads(run.stdout), run.stderr)


def path_without_java(directory: Path) -> str:
    """A directory with everything that is on the PATH, but for Java."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if not program.name.startswith("java") and not (directory / program.name).is_symlink():
                (directory / program.name).symlink_to(program)
    return str(directory)


def rows(query: str) -> list[Any]:
    return duckdb.execute(query).fetchall()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
class TestOneProgramOnAnySpark:
    def test_the_output_is_what_duckdb_makes_of_the_input(self, runs: Runs, kind: str) -> None:
        directory = runs[kind].directory
        bids, windows, counts = (f"'{directory}/{name}/*.parquet'" for name in ("bids", "windows", "counts"))
        wanted = rows(f"""
            SELECT auction, time_bucket(INTERVAL 10 seconds, date_time) AS start, count(*), max(price) / 100
            FROM {bids} WHERE price > 200 GROUP BY auction, start
            HAVING start + INTERVAL 10 seconds <= (SELECT max(date_time) - INTERVAL 5 seconds FROM {bids})
            ORDER BY ALL
        """)
        assert len(wanted) > 400
        assert rows(f"SELECT auction, window_start, bids, top FROM {windows} ORDER BY ALL") == wanted
        totals = rows(f"SELECT auction, bids FROM {counts} WHERE epoch = 3 ORDER BY ALL")
        assert totals == rows(f"SELECT auction, count(*) FROM {bids} GROUP BY auction ORDER BY ALL")

    def test_it_says_only_what_a_person_has_to_act_on_and_a_failed_task_is_not_that(
        self, runs: Runs, kind: str
    ) -> None:
        said = runs[kind].stderr.splitlines()
        # The server behind Spark Connect has a log of its own.
        asked = ["WARN TaskSchedulerImpl: Initial job has not accepted any resources; see to it"]
        assert [line.split(" ", 1)[1] for line in said] == ([] if kind == "connect" else asked)

    def test_the_error_of_a_task_comes_back_as_its_one_sentence(self, runs: Runs, kind: str) -> None:
        name, message = runs[kind].seen["failure"]
        assert name == "AttemptError"
        subtask = message[len("operator 'broken', subtask ")]
        assert message == (f"operator 'broken', subtask {subtask}: process_batch raised ValueError: the price is wrong")

    def test_every_subtask_is_told_of_the_checkpoint_once_in_a_process_of_its_own(self, runs: Runs, kind: str) -> None:
        seen = runs[kind].seen
        epochs = [metrics for metrics in seen["operators"] if metrics.pop("name") == "totals"]
        assert [metrics.pop("checkpoints") for metrics in epochs] == [2, 2, 2]
        for metrics in epochs:
            processes = {int(key.split()[0]) for key in metrics}
            assert len(processes) == 2
            assert seen["driver"] not in processes

    def test_asked_again_it_is_the_same_session(self, runs: Runs, kind: str) -> None:
        assert runs[kind].seen["same"]

    def test_one_process_has_one_spark(self, runs: Runs, kind: str) -> None:
        assert runs[kind].seen["other"].startswith("this process has a Spark session on ")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["connect", "cluster"])
def test_our_code_and_the_users_reach_executors_that_do_not_have_them(runs: Runs, kind: str) -> None:
    assert runs[kind].seen["installed"] is False
    assert "operators" in runs[kind].seen


@pytest.mark.timeout(900)
def test_an_embedded_spark_brings_its_own_java(runs: Runs) -> None:
    assert runs["embedded"].seen["java"].startswith("21.")


@pytest.mark.timeout(900)
def test_both_workers_of_a_cluster_take_part(runs: Runs) -> None:
    run = runs["cluster"]
    places = {key.split()[1] for metrics in run.seen["operators"] for key in metrics if "/app-" in key}
    assert {Path(place).parts[-3] for place in places} == {"one", "two"}


@pytest.mark.timeout(900)
def test_a_server_that_cannot_be_used_is_named_without_the_token(runs: Runs) -> None:
    token, tls, nobody = runs["connect"].seen["refused"]
    assert token.endswith(" refuses the session: Invalid authentication token")
    assert token.startswith("sc://localhost:")
    assert "with a token, an address means TLS, unless the host is called localhost" in tls
    assert nobody == "no Spark Connect server answers at sc://localhost:1"
    assert not any("token=" in text or "geheim" in text for text in (token, tls, nobody))


class TestRefused:
    def test_a_master_and_a_remote_address(self) -> None:
        with pytest.raises(ConfigurationError, match="a master or a remote address, not both"):
            open_session("local[2]", "sc://localhost")

    @pytest.mark.parametrize("master", ["nonsense", "local[x]", "sc://localhost", "spark://"])
    def test_what_is_no_master(self, master: str) -> None:
        with pytest.raises(ConfigurationError, match="is no Spark master: take"):
            open_session(master)

    @pytest.mark.parametrize("remote", ["localhost:15002", "sc://;token=geheim", "sc://host/;token=ge=heim"])
    def test_what_is_no_address(self, remote: str) -> None:
        with pytest.raises(ConfigurationError, match="is no address of a Spark Connect server") as caught:
            open_session(remote=remote)
        assert "heim" not in str(caught.value)

    @pytest.mark.parametrize("master", ["spark://127.0.0.1:1", "spark://127.0.0.1:1,127.0.0.1:2"])
    def test_a_master_that_does_not_answer(self, master: str) -> None:
        with pytest.raises(ConfigurationError, match=f"no Spark master answers at {master}: .*refused"):
            open_session(master)

    def test_another_master_than_the_one_that_the_process_has(self, spark: SparkSession) -> None:
        with pytest.raises(ConfigurationError, match=r"has a Spark session on local\[2\], and cannot have one on yarn"):
            open_session("yarn")


def test_any_embedded_spark_will_do(spark: SparkSession) -> None:
    assert local_session() is spark
    assert open_session() is spark
