"""What the documents say is so."""

import re
from pathlib import Path

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]

from arroyo_dagster.orchestration import metadata
from tests.test_repository import ROOT

DAGSTER = (ROOT / "docs" / "dagster.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    from definitions import defs  # noqa: PLC0415 - the example is loaded once a test wants it

    return defs


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_key_of_metadata_is_explained() -> None:
    assert dict(re.findall(r"^\| `arroyo/(\S+)` \| \w+ \| (.+) \|$", DAGSTER, re.MULTILINE)) == metadata.KEYS


def test_every_job_and_every_check_is_explained(definitions: dg.Definitions) -> None:
    jobs = {job.name for job in definitions.resolve_all_job_defs() if not job.name.startswith("__")}
    assert {f"auctions{name}" for name in re.findall(r"^\| `(_\w+)` \|", DAGSTER, re.MULTILINE)} == jobs
    checks = {key.name for key in definitions.resolve_asset_graph().asset_check_keys}
    section = DAGSTER.partition("## Asset checks")[2].partition("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == checks


def test_dagster_takes_the_settings_for_production(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load((ROOT / "docs" / "production" / "dagster.yaml").read_text())
    assert settings.pop("storage").keys() == {"postgres"}  # there is no such server here
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        queue = instance.get_concurrency_config().run_queue_config
    assert queue is not None
    [limit] = queue.tag_concurrency_limits
    assert (limit["key"], limit["limit"]) == ("arroyo_dagster/pipeline", 2)
