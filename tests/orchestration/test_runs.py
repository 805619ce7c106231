"""Which process a run is."""

import multiprocessing
from pathlib import Path

import dagster as dg

from arroyo_dagster.orchestration.runs import PROCESS_TAG, claim, is_gone
from arroyo_dagster.processes import own_run_id
from tests.orchestration.conftest import open_instance


@dg.job
def job() -> None:
    """Nothing."""


def claim_in(home: str, run_id: str) -> None:
    """Claim a run in the instance of that home."""
    with open_instance(Path(home)) as instance:
        run = instance.get_run_by_id(run_id)
        assert run
        claim(instance, run)


def tags_of(instance: dg.DagsterInstance, run_id: str) -> dict[str, str]:
    run = instance.get_run_by_id(run_id)
    assert run
    return dict(run.tags)


def test_it_is_the_process_that_claims_it(instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(job)
    claim(instance, run)
    assert tags_of(instance, run.run_id)[PROCESS_TAG] == f"{run.run_id}/{own_run_id()}"


def test_the_process_of_a_single_step_is_not_the_run(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    context = multiprocessing.get_context("spawn")
    step = context.Process(target=claim_in, args=(str(tmp_path / "dagster"), run.run_id))
    step.start()
    step.join()
    assert step.exitcode == 0
    assert PROCESS_TAG not in tags_of(instance, run.run_id)
    seen = instance.get_run_by_id(run.run_id)
    assert seen
    assert not is_gone(seen)
