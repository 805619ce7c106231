"""What Spark says about a failure, and the sentence that a person gets to see."""

import pytest

from arroyo_dagster.errors import AttemptError, DamagedObjectError
from arroyo_dagster.spark.failures import error_of

TRACE = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x/subtask.py", line 9, in run
    raise AttemptError("it broke") from error
          ^^^^^^^^^^^^
"""
IN_JAVA = """
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:
"""
LOST = (
    "Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times, most recent failure: "
    "Lost task 0.0 in stage 2.0 (TID 2) (localhost executor driver): "
)


class TestErrorsOfTasks:
    @pytest.mark.parametrize("end", ["", "\n", "\n SQLSTATE: 38000", IN_JAVA])
    @pytest.mark.parametrize("message", ["it broke", "it\nbroke", "it\n\n  broke"])
    def test_ours_keep_their_kind_and_their_sentence(self, message: str, end: str) -> None:
        error = error_of(f"{TRACE}arroyo_dagster.errors.DamagedObjectError: {message}{end}", "the stage failed")
        assert (type(error), str(error)) == (DamagedObjectError, "it broke")

    def test_the_last_of_a_chain_counts(self) -> None:
        inner = f"{TRACE}arroyo_dagster.errors.StorageError: inner\n\nThe above exception was the direct cause of:\n\n"
        error = error_of(f"{inner}{TRACE}arroyo_dagster.errors.AttemptError: outer", "the stage failed")
        assert (type(error), str(error)) == (AttemptError, "outer")

    @pytest.mark.parametrize(
        ("raised", "sentence"),
        [
            ("ModuleNotFoundError: No module named 'rules'", "ModuleNotFoundError: No module named 'rules'"),
            ("obstore.exceptions.GenericError: no answer", "GenericError: no answer"),
            ("their.errors.AttemptError: not ours", "AttemptError: not ours"),
            ("KeyboardInterrupt", "KeyboardInterrupt"),
        ],
    )
    def test_others_say_what_failed(self, raised: str, sentence: str) -> None:
        error = error_of(f"{TRACE}{raised}{IN_JAVA}", "the stage failed")
        assert (type(error), str(error)) == (AttemptError, f"the stage failed: {sentence}")


IN_A_CALL = "An error occurred while calling o118.collectToPython.\n: "
OVER_THE_NETWORK = """<_InactiveRpcError of RPC that terminated with:
\tstatus = StatusCode.UNAVAILABLE
\tdetails = "failed to connect"
\tdebug_error_string = "UNKNOWN: {}"
>"""
KILLED = "ExecutorLostFailure (executor 1 exited): it was killed"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{IN_A_CALL}org.apache.spark.SparkException: {LOST}x.y.SparkException: It crashed.{IN_JAVA}", "It crashed."),
        (f"{LOST}{KILLED}", KILLED),
        (f"{IN_A_CALL}java.lang.IllegalStateException: Spark was stopped{IN_JAVA}", "Spark was stopped"),
        (OVER_THE_NETWORK, "failed to connect"),
        ("\n[DIVIDE_BY_ZERO] Division by zero.\nSQLSTATE: 22012", "[DIVIDE_BY_ZERO] Division by zero."),
    ],
)
def test_of_a_failure_in_java_the_cause_is_told(text: str, sentence: str) -> None:
    assert str(error_of(text, "the stage failed")) == f"the stage failed: {sentence}"
