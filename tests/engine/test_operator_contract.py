"""The order of an operator's calls, and what becomes of its state when it says no or fails."""

from pathlib import Path

import pyarrow as pa
import pytest

from arroyo_dagster import Pipeline
from arroyo_dagster.errors import AttemptError
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.operators import Recorder, calls
from tests.engine.oracle import take_epochs

ROWS = pa.table(
    {
        "k": [f"key {number}" for number in range(40)],
        "t": pa.array([number * 1_000_000 for number in range(40)], pa.timestamp("us")),
    }
)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def engine_with(tmp_path: Path, operator: Recorder, parallelism: int = 2) -> InProcessEngine:
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=parallelism)
    rows = pipeline.source("rows", TableSource(ROWS, [20, 40], 2), event_time="t")
    rows.key_by("k").process("recorder", operator).sink("out", ParquetSink(str(tmp_path / "out")))
    return InProcessEngine(pipeline)


def test_methods_are_called_in_order_and_once_a_subtask(tmp_path: Path, notes: Path) -> None:
    take_epochs(engine_with(tmp_path, Recorder(str(notes))), 2)
    for subtask in range(2):
        for epoch in (1, 2):
            mine = [call for call in calls(notes) if (call["subtask"], call["epoch"]) == (subtask, epoch)]
            methods = [call["method"] for call in mine]
            batches = [method for method in methods if method == "process_batch"]
            assert methods == ["on_start", *batches, "handle_watermark", "handle_checkpoint", "on_close"]
            assert batches


def test_the_epoch_begins_with_the_state_that_the_last_one_left(tmp_path: Path, notes: Path) -> None:
    take_epochs(engine_with(tmp_path, Recorder(str(notes))), 2)
    seen = {(call["epoch"], call["subtask"]): call["detail"] for call in calls(notes) if call["method"] == "on_start"}
    assert seen[1, 0] == seen[1, 1] == 0
    assert seen[2, 0] + seen[2, 1] == 20  # type: ignore[operator]


def test_the_watermark_is_seen_before_the_checkpoint(tmp_path: Path, notes: Path) -> None:
    take_epochs(engine_with(tmp_path, Recorder(str(notes))), 2)
    marks = {(call["epoch"], call["detail"]) for call in calls(notes) if call["method"] == "handle_watermark"}
    assert marks == {(1, "1970-01-01T00:00:19+00:00"), (2, "1970-01-01T00:00:39+00:00")}


class TestSayingNo:
    def test_carries_the_state_forward_and_is_on_record(self, tmp_path: Path, notes: Path) -> None:
        engine = engine_with(tmp_path, Recorder(str(notes)))
        [first] = take_epochs(engine, 1)
        silent = engine_with(tmp_path, Recorder(str(notes), answer=False, write="no"))
        [second] = take_epochs(silent, 1)
        assert second.manifest.tables == first.manifest.tables
        assert first.manifest.operators[0].skipped == ()
        assert second.manifest.operators[0].skipped == (0, 1)

    def test_passes_the_barrier_and_the_rows_on_all_the_same(self, tmp_path: Path, notes: Path) -> None:
        [taken] = take_epochs(engine_with(tmp_path, Recorder(str(notes), answer=False, write="no")), 1)
        assert taken.manifest.operators[0].rows_out == 20
        assert sum(file.rows for file in taken.manifest.staged[0].files) == 20

    def test_with_rows_that_would_be_lost_fails_and_names_the_table(self, tmp_path: Path, notes: Path) -> None:
        engine = engine_with(tmp_path, Recorder(str(notes), answer=False))
        message = "operator 'recorder', subtask 0: handle_checkpoint said False, but table 'times' has rows"
        with pytest.raises(AttemptError, match=message):
            take_epochs(engine, 1)
        assert engine.state().head == 0

    def test_after_a_discard_is_fine(self, tmp_path: Path, notes: Path) -> None:
        [taken] = take_epochs(engine_with(tmp_path, Recorder(str(notes), answer=False, discard="yes")), 1)
        assert list(taken.manifest.files) == []
        assert taken.manifest.operators[0].skipped == (0, 1)


class TestAnError:
    @pytest.mark.parametrize(
        "method", ["on_start", "process_batch", "handle_watermark", "handle_checkpoint", "on_close"]
    )
    def test_fails_the_attempt_and_says_where(self, tmp_path: Path, notes: Path, method: str) -> None:
        engine = engine_with(tmp_path, Recorder(str(notes), True, **{method: "raise"}))
        message = f"operator 'recorder', subtask 0: {method} raised ZeroDivisionError: in {method}"
        with pytest.raises(AttemptError, match=message):
            take_epochs(engine, 1)
        state = engine.state()
        assert (state.head, state.in_flight, state.failures.count) == (0, None, 1)
        assert [call["method"] for call in calls(notes)][-1] == "on_close"

    def test_leaves_nothing_in_the_sink(self, tmp_path: Path, notes: Path) -> None:
        engine = engine_with(tmp_path, Recorder(str(notes), handle_checkpoint="raise"))
        with pytest.raises(AttemptError):
            take_epochs(engine, 1)
        assert not list((tmp_path / "out").glob("*.parquet"))
        take_epochs(engine_with(tmp_path, Recorder(str(notes))), 1)
        assert len(list((tmp_path / "out").glob("*.parquet"))) == 2

    def test_an_answer_that_is_neither_yes_nor_no_is_one(self, tmp_path: Path, notes: Path) -> None:
        engine = engine_with(tmp_path, Recorder(str(notes), answer=None))  # type: ignore[arg-type]
        with pytest.raises(AttemptError, match="handle_checkpoint: it must return True or False, not None"):
            take_epochs(engine, 1)


def test_a_global_table_is_seen_whole_by_every_subtask(tmp_path: Path, notes: Path) -> None:
    engine = engine_with(tmp_path, Noting(str(notes)), parallelism=3)
    take_epochs(engine, 3)
    seen = [call["detail"] for call in calls(notes) if call["method"] == "notes"]
    each = [["subtask 0", "subtask 1", "subtask 2"]] * 3
    assert seen == [[], [], [], *each, *each]
    assert engine.verify() == []


class Noting(Recorder):
    """Leaves a note in the global table in the first epoch, and reads all notes in every one."""

    def on_start(self, ctx):  # type: ignore[no-untyped-def]
        table = ctx.table(self.notes)
        self.note("notes", ctx, sorted(table.scan()["name"].to_pylist()))
        if ctx.barrier.epoch == 1:
            name = f"subtask {ctx.subtask_index}"
            table.upsert(pa.table({"name": [name], "value": [ctx.barrier.epoch]}))
