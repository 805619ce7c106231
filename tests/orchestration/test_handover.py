"""What ops give to each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import names, open_store
from arroyo_dagster.log.store import ObjectStorage
from arroyo_dagster.model import ObjectPath
from arroyo_dagster.orchestration.handover import HandoverIOManager, clear
from arroyo_dagster.spark.reports import StageReport
from tests.orchestration.helpers import begin, create_object, deployment_of, pipeline_in, take

RUN = "3f2a9c1d-7b5e-4c2e-9d53-5f0b8d9b8f10"
STEP = "p_epoch.stats"


@pytest.fixture
def manager(tmp_path: Path) -> HandoverIOManager:
    return HandoverIOManager(deployment_of(pipeline_in(tmp_path)))


def give(manager: HandoverIOManager, value: Any, run: str = RUN, step: str = STEP) -> None:
    with dg.build_output_context(run_id=run, step_key=step, name="result", resources={}) as context:
        manager.handle_output(context, [value])


def get(manager: HandoverIOManager, run: str = RUN, step: str = STEP) -> Any:
    with (
        dg.build_output_context(run_id=run, step_key=step, name="result", resources={}) as upstream,
        dg.build_input_context(upstream_output=upstream, resources={}) as context,
    ):
        [value] = manager.load_input(context)
        return value


def test_values_are_the_same_when_they_come_back(manager: HandoverIOManager, tmp_path: Path) -> None:
    take(pipeline_in(tmp_path), 2)
    engine, attempt = begin(pipeline_in(tmp_path), RUN)
    give(manager, attempt, step="p_epoch.begin_epoch")
    assert get(manager, step="p_epoch.begin_epoch") == attempt
    reports: dict[str, StageReport] = {}
    for stage in engine.stages:
        reports[stage.name] = engine.run_stage(attempt, stage.name, reports)
        give(manager, reports[stage.name], step=f"p_epoch.{stage.name}")
    for name, report in reports.items():
        assert get(manager, step=f"p_epoch.{name}") == report
    assert reports["stats"].operator
    assert reports["raw"].staged


def test_are_documents_that_say_what_they_are(manager: HandoverIOManager, tmp_path: Path) -> None:
    _, attempt = begin(pipeline_in(tmp_path))
    give(manager, attempt)
    text = (tmp_path / "state" / "p" / "handovers" / RUN / f"{STEP}.json").read_text()
    assert text.startswith('{"version": 1, "kind": "Attempt", "values": [{"barrier": {"epoch": 1')


def test_the_later_of_two_tries_of_a_step_counts(manager: HandoverIOManager, tmp_path: Path) -> None:
    take(pipeline_in(tmp_path))
    _, attempt = begin(pipeline_in(tmp_path))
    give(manager, attempt)
    later = replace(attempt, parallelism=7)
    give(manager, later)
    assert get(manager) == later != attempt


def test_one_that_is_lost_is_one_sentence(manager: HandoverIOManager) -> None:
    with pytest.raises(dg.Failure) as failure:
        get(manager)
    assert failure.value.description == (
        "there is nothing from p_epoch.stats of run 3f2a9c1d, because its epoch was completed meanwhile or the "
        "pipeline has changed: launch the job anew"
    )
    assert failure.value.allow_retries is False


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[]", b'{"version": 1, "kind": "Attempt", "values": []}', b"\xff"])
def test_one_that_is_damaged_is_one_sentence(manager: HandoverIOManager, tmp_path: Path, data: bytes) -> None:
    create_object(pipeline_in(tmp_path), names.handover(RUN, STEP), data)
    with pytest.raises(dg.Failure) as failure:
        get(manager)
    assert f"handovers/{RUN}/{STEP}.json" in str(failure.value.description)
    assert "\n" not in str(failure.value.description)


def test_of_a_newer_release_is_told_from_a_damaged_one(manager: HandoverIOManager, tmp_path: Path) -> None:
    create_object(pipeline_in(tmp_path), names.handover(RUN, STEP), b'{"version": 2, "kind": "Attempt", "values": []}')
    with pytest.raises(dg.Failure, match="has format 2, and this release reads up to 1: upgrade"):
        get(manager)


def run_of(run_id: str, parent: str | None = None, root: str | None = None) -> dg.DagsterRun:
    return dg.DagsterRun(job_name="p_checkpoint", run_id=run_id, parent_run_id=parent, root_run_id=root)


class TestClear:
    def test_takes_what_the_run_and_those_before_it_have_left_and_nothing_else(
        self, manager: HandoverIOManager, tmp_path: Path
    ) -> None:
        pipeline = pipeline_in(tmp_path)
        take(pipeline)
        _, attempt = begin(pipeline)
        runs = [f"{number}f2a9c1d-7b5e-4c2e-9d53-5f0b8d9b8f10" for number in range(4)]
        for run in runs:
            give(manager, attempt, run)
        first, second, third, other = runs
        store = Engine(pipeline).store
        assert clear(store, run_of(third, second, first)) == []
        assert store.names(ObjectPath("handovers")) == [names.handover(other, STEP)]
        assert clear(store, run_of(third, second, first)) == []

    def test_tells_what_could_not_be_taken_away(
        self, manager: HandoverIOManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, attempt = begin(pipeline_in(tmp_path))
        give(manager, attempt)

        def refuse(self: ObjectStorage, path: ObjectPath) -> None:
            raise StorageError(f"could not delete {path}: access denied")

        monkeypatch.setattr(ObjectStorage, "delete", refuse)
        store = open_store(str(tmp_path / "state")).below("p")
        assert clear(store, run_of(RUN)) == [f"could not delete handovers/{RUN}/{STEP}.json: access denied"]
