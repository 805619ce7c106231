"""A copy of what this repository shows to new users, quick enough for a test, with a server in it."""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.end_to_end.server import DagsterServer, wait_for

ROOT = Path(__file__).parent.parent.parent
EVENTS_PER_SECOND = 2_000
ASSETS = ["bid_stats", "price_records", "hot_auctions", "record_prices"]

_HURRY = {
    'checkpoint_interval="30 seconds"': 'checkpoint_interval="5 seconds"',
    "events_per_second=10_000": f"events_per_second={EVENTS_PER_SECOND}",
}
_PROJECT = """
[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "definitions"
defs_module = "definitions"
code_location_name = "auctions"
code_location_target_module = "definitions"
"""
_SELECTOR = {"repositoryLocationName": "auctions", "repositoryName": "__repository__"}
_CONTROLLER = {**_SELECTOR, "sensorName": "auctions_controller"}
_ENDED = {"SUCCESS", "FAILURE", "CANCELED"}

_RUNS = """query ($filter: RunsFilter, $limit: Int) { runsOrError(filter: $filter, limit: $limit) { ... on Runs {
    results { runId jobName status tags { key value } stepStats { stepKey status } } } } }"""
_TICKS = """query ($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { ... on Sensor {
    sensorState { ticks(limit: 100) { status skipReason runIds error { message } } } } } }"""
_ASSET = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    partitionKeys
    assetMaterializations(limit: 1000) { partition runId metadataEntries { label
        ... on IntMetadataEntry { intValue } ... on FloatMetadataEntry { floatValue }
        ... on MarkdownMetadataEntry { mdStr } } }
    assetChecksOrError { ... on AssetChecks { checks { name
        executionForLatestMaterialization { status } } } } } } }"""
_SENSOR = "query ($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { ... on Sensor { id } } }"
_STOP_SENSOR = "mutation ($id: String!) { stopSensor(id: $id) { __typename } }"
_START_SENSOR = "mutation ($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) { __typename } }"
_EPOCHS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
    assetMaterializations(limit: 1000) { partition } } } }"""
_LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""


class Project:
    """The project and its server, from beginning to end of a `with` statement."""

    def __init__(self, directory: Path) -> None:
        """Copy the definitions; nothing is started yet."""
        self.directory = directory / "auctions"
        self.directory.mkdir()
        program = (ROOT / "definitions.py").read_text()
        for slow, quick in _HURRY.items():
            assert slow in program
            program = program.replace(slow, quick)
        (self.directory / "definitions.py").write_text(program)
        (self.directory / "pyproject.toml").write_text(_PROJECT)
        # Java's quicker compiler is enough for so little work.
        quick_java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        self.server = DagsterServer(self.directory, directory / "home", JDK_JAVA_OPTIONS=quick_java)

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.__exit__(kind, error, trace)

    def epochs(self) -> list[dict[str, Any]]:
        """All epochs, as the command line tells them."""
        return list(self.tell("epochs", "auctions")["epochs"])

    def tell(self, *command: str) -> Any:
        """What the command line answers."""
        program = [sys.executable, "-m", "arroyo_dagster", *command, "--json"]
        run = subprocess.run(program, cwd=self.directory, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def runs(self, limit: int | None = None, **filter: Any) -> list[dict[str, Any]]:
        """Checkpoint runs, the newest first, each with its tags and the status of its steps by name.

        Whenever the clock says so there is a cleaning among all runs, so the others are not asked for.
        """
        runs = self.server.ask(_RUNS, filter=filter or {"pipelineName": "auctions_checkpoint"}, limit=limit)
        for run in runs["runsOrError"]["results"]:
            run["tags"] = {tag["key"]: tag["value"] for tag in run["tags"]}
            run["steps"] = {step["stepKey"].rpartition(".")[2]: step["status"] for step in run["stepStats"]}
        return list(runs["runsOrError"]["results"])

    def run(self, run_id: str) -> dict[str, Any]:
        """One run, of whatever job."""
        [run] = self.runs(runIds=[run_id])
        return run

    def ticks(self) -> list[dict[str, Any]]:
        """The controller's last ticks, the newest first."""
        return list(self.server.ask(_TICKS, sensor=_CONTROLLER)["sensorOrError"]["sensorState"]["ticks"])

    def pause(self) -> None:
        """Turn the sensor off, and wait until nothing happens any more."""
        sensor = self.server.ask(_SENSOR, sensor=_CONTROLLER)["sensorOrError"]
        assert self.server.ask(_STOP_SENSOR, id=sensor["id"])["stopSensor"]["__typename"] == "StopSensorMutationResult"
        wait_for("the end of all runs", lambda: all(run["status"] in _ENDED for run in self.runs()), 120)

    def unpause(self) -> None:
        """Turn the sensor on again."""
        assert self.server.ask(_START_SENSOR, sensor=_CONTROLLER)["startSensor"]["__typename"] == "Sensor"

    def asset(self, name: str) -> dict[str, Any]:
        """An asset: its partitions, checks, and materializations with their metadata, the newest first."""
        asset: dict[str, Any] = self.server.ask(_ASSET, key={"path": ["auctions", name]})["assetNodeOrError"]
        for event in asset["assetMaterializations"]:
            entries = event.pop("metadataEntries")
            event["metadata"] = {entry.pop("label"): next(iter(entry.values()), None) for entry in entries}
        return asset

    def launch(self, job: str) -> dict[str, Any]:
        """Launch a job as from the launchpad, and return its run when it has ended."""
        params = {"selector": {**_SELECTOR, "jobName": job}, "runConfigData": {}, "mode": "default"}
        answer = self.server.ask(_LAUNCH, params=params)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        run_id = answer["run"]["runId"]

        def ended() -> dict[str, Any] | None:
            run = self.run(run_id)
            return run if run["status"] in _ENDED else None

        return wait_for(f"the end of {job}", ended)

    def wait_for_epoch(self, epoch: int, seconds: float = 240) -> None:
        """Wait until an epoch's materializations are there, which are the last thing that a run reports."""
        self.server.location()
        key = {"path": ["auctions", ASSETS[-1]]}

        def there() -> bool:
            events = self.server.ask(_EPOCHS, key=key)["assetNodeOrError"]["assetMaterializations"]
            return any(event["partition"] == f"{epoch:08d}" for event in events)

        wait_for(f"epoch {epoch}", there, seconds, every=1)
