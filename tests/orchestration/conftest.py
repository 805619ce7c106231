"""A Dagster on disk for every test."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest


def open_instance(directory: Path) -> dg.DagsterInstance:
    overrides = {
        "telemetry": {"enabled": False},
        # One database for the events of all runs: by default each run gets its own, which takes half a second to make.
        "event_log_storage": {
            "module": "dagster._core.storage.event_log",
            "class": "ConsolidatedSqliteEventLogStorage",
            "config": {"base_dir": str(directory / "events")},
        },
    }
    return dg.DagsterInstance.local_temp(str(directory), overrides=overrides)


@pytest.fixture(scope="session")
def new_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose databases are made: that takes Dagster two seconds, and copying them nothing."""
    home = tmp_path_factory.mktemp("dagster")
    with open_instance(home) as instance:
        instance.get_run_records(limit=1)
        instance.has_dynamic_partition("epochs", "1")
        instance.report_runless_asset_event(dg.AssetMaterialization("made"))
        instance.wipe_assets([dg.AssetKey("made")])
    return home


@pytest.fixture
def instance(new_home: Path, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    shutil.copytree(new_home, tmp_path / "dagster")
    with open_instance(tmp_path / "dagster") as opened:
        yield opened


@pytest.fixture
def another_instance(new_home: Path, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A second Dagster that knows nothing of the first."""
    shutil.copytree(new_home, tmp_path / "another")
    with open_instance(tmp_path / "another") as opened:
        yield opened
