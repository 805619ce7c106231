"""The command line: what it prints, where, and how it exits."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from arroyo_dagster.cli import main
from arroyo_dagster.engine import Engine
from arroyo_dagster.log import Log, open_store
from arroyo_dagster.log.entries import EpochPinned, StopRequested
from arroyo_dagster.testing import InProcessEngine
from tests.facts import append, committed, rewound

ROOT = Path(__file__).parent.parent
EXAMPLE = """
    from pathlib import Path

    from arroyo_dagster import Pipeline, agg
    from arroyo_dagster.sinks import ParquetSink
    from arroyo_dagster.sources import NexmarkSource

    print("this module talks")
    here = Path(__file__).parent

    def check(batch):
        if (here / "broken").exists():
            raise RuntimeError("the disk\\nwas full")
        return batch

    example = Pipeline("example", parallelism=2)
    bids = example.source(
        "bids", NexmarkSource("bid", start="2026-01-01T00:00:00Z", max_events_per_epoch=5_000), event_time="date_time"
    )
    (
        bids.map_batches(check).key_by("auction").tumble("100 milliseconds").aggregate("stats", bids=agg.count())
        .sink("counts", ParquetSink("out"))
    )
"""
_modules = itertools.count()


class Terminal:
    """A directory with a module that nobody has imported before, and somebody who types."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.module = f"cli_example_{next(_modules)}"
        self.file = directory / f"{self.module}.py"
        self.file.write_text(textwrap.dedent(EXAMPLE))

    def type(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--module", self.module])

    def json(self, *arguments: str, code: int = 0) -> Any:
        result = self.type(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "arroyo_dagster", *arguments, "--module", self.module]
        return subprocess.Popen(command, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def log(self) -> Log:
        return Log(open_store(str(self.directory / ".arroyo")).below("example"), "test")


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Commands are run in this process and without Spark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARROYO_STATE_URL", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("arroyo_dagster.cli.commands.Engine", InProcessEngine)
    return Terminal(tmp_path)


def test_list_names_pipelines_their_nodes_and_how_far_they_are(terminal: Terminal) -> None:
    assert terminal.json("list") == {
        "pipelines": [
            {
                "name": "example",
                "sources": ["bids"],
                "operators": ["stats"],
                "sinks": ["counts"],
                "state": str(terminal.directory / ".arroyo" / "example"),
                "head": 0,
                "mode": "running",
            }
        ]
    }
    terminal.json("run", "example", "--epochs", "2")
    assert terminal.json("list")["pipelines"][0]["head"] == 2
    assert "example" in terminal.type("list").stdout


def test_run_takes_epochs_and_ends_with_a_table(terminal: Terminal) -> None:
    result = terminal.type("run", "example", "--epochs", "2")
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    assert [word for word in ("epoch", "read", "align", "handle", "persist", "publish") if word not in words] == []
    assert words.count("4,600") == 2  # bids among 5,000 events
    assert "this module talks" in result.stderr


def test_run_as_json_tells_the_same_numbers(terminal: Terminal) -> None:
    document = terminal.json("run", "example", "--epochs", "3")
    assert [epoch["epoch"] for epoch in document["epochs"]] == [1, 2, 3]
    assert [epoch["rows_in"] for epoch in document["epochs"]] == [4_600] * 3
    assert all(epoch["publish_ms"] >= 0 for epoch in document["epochs"])
    [rows] = duckdb.read_parquet("out/**/*.parquet").count("*").fetchall()
    assert rows == (sum(epoch["rows_out"] for epoch in document["epochs"]),)
    assert rows > (0,)


def test_an_epoch_that_fails_is_one_sentence_and_the_next_run_carries_on(terminal: Terminal) -> None:
    broken = terminal.directory / "broken"
    broken.touch()
    for _ in range(12):  # however often that was
        result = terminal.type("run", "example")
        assert result.exit_code == 1
        assert result.stdout == ""
        [sentence] = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert "the disk was full" in sentence
    broken.unlink()
    [epoch] = terminal.json("run", "example")["epochs"]
    assert (epoch["epoch"], epoch["attempt"]) == (1, 13)


def test_a_failure_after_some_epochs_does_not_hide_them(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Engine.publish

    def once(engine: Engine) -> None:
        publish(engine)
        (terminal.directory / "broken").touch()

    monkeypatch.setattr(Engine, "publish", once)
    document = terminal.json("run", "example", "--epochs", "3", code=1)
    assert [epoch["epoch"] for epoch in document["epochs"]] == [1]
    assert "the disk was full" in document["error"]


def test_a_stopped_pipeline_says_so(terminal: Terminal) -> None:
    terminal.json("run", "example")
    append(terminal.log, StopRequested())
    document = terminal.json("run", "example", "--epochs", "3", code=1)
    assert [epoch["epoch"] for epoch in document["epochs"]] == [2]
    assert document["error"] == "pipeline 'example': stopped at epoch 2; resume to go on"
    assert terminal.type("run", "example").stderr.endswith("stopped at epoch 2; resume to go on\n")


def test_a_bug_is_one_sentence_with_a_hint(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: Engine, *_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(Engine, "run_epoch", fail)
    document = terminal.json("run", "example", code=1)
    assert document == {"error": "KeyError: 'surprise' (--traceback shows where it comes from)"}
    result = terminal.type("run", "example", "--traceback")
    assert result.exit_code == 1
    assert "in fail" in result.stderr


def test_epochs_tell_how_they_stand(terminal: Terminal) -> None:
    terminal.json("run", "example", "--epochs", "3")
    append(terminal.log, EpochPinned(1, "before the move"))
    append(terminal.log, rewound(terminal.log.read(), to=2))
    append(terminal.log, committed(terminal.log.read()))
    epochs = terminal.json("epochs", "example")["epochs"]
    assert [(epoch["epoch"], epoch["live"], epoch["head"], epoch["pin"]) for epoch in epochs] == [
        (1, True, False, "before the move"),
        (2, True, True, None),
        (3, False, False, None),
    ]
    assert [epoch["parent"] for epoch in epochs] == [0, 1, 2]
    text = terminal.type("epochs", "example").stdout
    assert [word for word in ("live, pinned before the move", "live, head", "superseded") if word not in text] == []


def test_show_tells_everything_about_an_epoch(terminal: Terminal) -> None:
    terminal.json("run", "example", "--epochs", "2")
    document = terminal.json("show", "example", "2")
    assert document["manifest"]["barrier"]["epoch"] == document["summary"]["epoch"] == 2
    assert document["standing"]["head"] is True
    text = terminal.type("show", "example", "2").stdout
    file = document["manifest"]["tables"][0]["files"][0]["path"].rsplit("/", 1)[1]
    wanted = ("Epoch 2 of example", "4,600", "stats.windows", "handle_checkpoint", "10000", "2026-01-01 00:00:00", file)
    assert [word for word in wanted if word not in text] == []


def test_long_offsets_are_abbreviated_for_people_only(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arroyo_dagster.cli.texts._LONGEST_OFFSET", 10)
    terminal.json("run", "example")
    assert '{"start":…' in terminal.type("show", "example", "1").stdout
    assert terminal.json("show", "example", "1")["manifest"]["plan"]["sources"]["bids"]["end"]["events"] == 5_000


def test_verify_names_what_is_wrong(terminal: Terminal) -> None:
    terminal.json("run", "example", "--epochs", "2")
    assert terminal.json("verify", "example") == {"pipeline": "example", "epochs": 2, "problems": []}
    assert terminal.type("verify", "example").stdout == "epochs 1-2 of pipeline 'example' are whole\n"
    file = terminal.json("show", "example", "2")["manifest"]["tables"][0]["files"][0]["path"]
    (terminal.directory / ".arroyo" / "example" / file).write_bytes(b"flipped")
    document = terminal.json("verify", "example", code=1)
    assert document["error"] == "pipeline 'example' has 1 problem"
    assert file in document["problems"][0]
    result = terminal.type("verify", "example")
    assert result.exit_code == 1
    assert file in result.stdout


def test_looking_makes_no_directories(terminal: Terminal) -> None:
    before = sorted(terminal.directory.iterdir())
    assert terminal.json("epochs", "example") == {"pipeline": "example", "epochs": []}
    assert terminal.type("epochs", "example").stdout == "pipeline 'example' has no epochs yet\n"
    assert terminal.type("verify", "example").exit_code == 0
    assert terminal.json("show", "example", "1", code=1) == {"error": "pipeline 'example' has no epochs yet"}
    terminal.json("list")
    assert [path for path in terminal.directory.iterdir() if path.name != "__pycache__"] == before


def test_the_state_given_on_the_command_line_wins(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARROYO_STATE_URL", str(terminal.directory / "environment"))
    terminal.json("run", "example", "--state", "here")
    terminal.json("run", "example", "--epochs", "2")
    assert terminal.json("list", "--state", "here")["pipelines"][0]["head"] == 1
    assert terminal.json("list")["pipelines"][0]["state"] == str(terminal.directory / "environment" / "example")


def test_a_module_may_be_the_path_of_a_file(
    terminal: Terminal, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    result = CliRunner().invoke(main, ["list", "--json", "--module", str(terminal.file)])
    assert json.loads(result.stdout)["pipelines"][0]["name"] == "example"


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("nowhere", None, "there is no module 'nowhere' in"),
        ("nowhere.py", None, "nowhere.py: give --module the name of a module"),
        ("two-words.py", "", "cannot be imported under its name 'two-words'"),
        ("json.py", "", "json.py has the name of another module"),
        (
            "cli_typo.py",
            "import arroyo_dagster\narroyo_dagster.Pipelin('x')",
            "AttributeError: module 'arroyo_dagster'",
        ),
        ("cli_needs.py", "import not_there", "the module 'cli_needs' cannot be loaded: ModuleNotFoundError"),
        ("cli_empty.py", "", "cli_empty.py has no pipeline 'example' at its top level: it has none"),
        (
            "cli_twice.py",
            "from arroyo_dagster import Pipeline\na, b = Pipeline('example'), Pipeline('example')",
            "cli_twice.py has two pipelines named 'example': rename one",
        ),
        (
            "cli_half.py",
            "from arroyo_dagster import Pipeline\nexample = Pipeline('example')",
            "pipeline 'example' has no source",
        ),
        ("cli_other.py", "from arroyo_dagster import Pipeline\nother = Pipeline('other')", "it has other"),
    ],
)
def test_a_module_that_will_not_do_is_one_sentence(
    name: str, content: str | None, error: str, terminal: Terminal
) -> None:
    if content is not None:
        (terminal.directory / name).write_text(content)
    result = CliRunner().invoke(main, ["run", "example", "--json", "--module", name])
    assert result.exit_code == 1
    assert error in json.loads(result.stdout)["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "example", "--epochs", "0"],
        ["run", "example", "--master", "local[2]", "--remote", "sc://localhost"],
        ["show", "example", "first"],
        ["fly"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], terminal: Terminal) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr


def test_run_on_spark(terminal: Terminal, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arroyo_dagster.cli.commands.Engine", Engine)
    monkeypatch.setattr("arroyo_dagster.cli.progress.open_session", lambda **_: spark)
    [epoch] = terminal.json("run", "example")["epochs"]
    assert epoch["rows_in"] == 4_600
    assert epoch["process_ms"] > 0


def test_a_run_that_was_killed_holds_nobody_up(terminal: Terminal) -> None:
    victim = terminal.start("run", "example", "--epochs", "100")
    try:
        begun = terminal.directory / ".arroyo" / "example" / "log" / f"{2:020d}.json"
        deadline = time.monotonic() + 60
        while not begun.exists():
            assert time.monotonic() < deadline
            assert victim.poll() is None, victim.communicate()
            time.sleep(0.01)
        error = terminal.json("run", "example", code=1)["error"]
        assert f"epoch 1, attempt 1, is being taken by process-{victim.pid}-" in error
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    [epoch] = terminal.json("run", "example")["epochs"]
    assert (epoch["epoch"], epoch["attempt"]) == (1, 2)


def test_looking_loads_no_spark(terminal: Terminal) -> None:
    program = (
        "import sys; from arroyo_dagster.cli import main; "
        f"main(['list', '--json', '--module', '{terminal.module}'], standalone_mode=False); "
        "print([name for name in ('pyspark', 'py4j', 'pandas', 'dagster') if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=terminal.directory, capture_output=True, text=True, check=True)
    assert run.stderr.splitlines() == ["this module talks", "[]"]
    assert json.loads(run.stdout)["pipelines"][0]["name"] == "example"


def test_processes_exit_with_what_they_found(terminal: Terminal) -> None:
    listed, failed = terminal.start("list", "--json"), terminal.start("epochs", "nothing", "--json")
    stdout, _ = listed.communicate(timeout=60)
    assert (listed.returncode, json.loads(stdout)["pipelines"][0]["head"]) == (0, 0)
    stdout, stderr = failed.communicate(timeout=60)
    assert (failed.returncode, list(json.loads(stdout))) == (1, ["error"])
    assert "has no pipeline 'nothing'" in stderr


def test_the_example_runs_from_an_empty_directory_on_a_spark_of_its_own(tmp_path: Path) -> None:
    shutil.copy(ROOT / "definitions.py", tmp_path)
    script = str(Path(sys.prefix, "bin", "arroyo-dagster"))
    environ = {name: value for name, value in os.environ.items() if name != "ARROYO_STATE_URL"}
    run = subprocess.run(
        [script, "run", "auctions", "--json"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    [epoch] = json.loads(run.stdout)["epochs"]
    assert epoch["rows_out"] > 0
    auctions = duckdb.read_parquet(f"{tmp_path}/data/hot_auctions/**/*.parquet")
    records = duckdb.read_parquet(f"{tmp_path}/data/record_prices/*.parquet")
    [[hot]], [[records_rows]] = auctions.count("*").fetchall(), records.count("*").fetchall()
    assert hot + records_rows == epoch["rows_out"]
    assert auctions.min("top_price").fetchall() > [(100,)]
    best = auctions.aggregate("auction, max(top_price) AS price", "auction")
    assert sorted(records.fetchall()) == sorted(best.fetchall())
