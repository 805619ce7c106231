"""Which process a run is."""

import dagster as dg

from arroyo_dagster.orchestration.runs import PROCESS_TAG, claim, is_gone
from arroyo_dagster.processes import own_run_id


@dg.op
def begin(context: dg.OpExecutionContext) -> None:
    claim(context)


@dg.job(executor_def=dg.in_process_executor)
def in_one_process() -> None:
    begin()


@dg.job(executor_def=dg.multiprocess_executor)
def in_many_processes() -> None:
    begin()


def run_of(instance: dg.DagsterInstance, job: dg.JobDefinition) -> dg.DagsterRun:
    with dg.execute_job(dg.reconstructable(job), instance=instance) as result:
        assert result.success
        run = instance.get_run_by_id(result.run_id)
    assert run
    return run


def test_it_is_the_one_that_executes_all_of_its_steps(instance: dg.DagsterInstance) -> None:
    run = run_of(instance, in_one_process)
    assert run.tags[PROCESS_TAG] == f"{run.run_id}/{own_run_id()}"
    assert not is_gone(run)


def test_it_is_not_that_of_a_single_step_which_ends_before_the_run(instance: dg.DagsterInstance) -> None:
    run = run_of(instance, in_many_processes)
    assert PROCESS_TAG not in run.tags
    assert not is_gone(run)
