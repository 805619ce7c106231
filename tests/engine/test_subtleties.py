"""What goes wrong only when several things come together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pendulum
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arroyo_dagster import CheckpointBarrier, CheckpointPolicy, GlobalTable, Operator, OperatorContext, Pipeline, agg
from arroyo_dagster.controller import Wait
from arroyo_dagster.engine import Taken
from arroyo_dagster.errors import AttemptError, ConfigurationError
from arroyo_dagster.log import Appended
from arroyo_dagster.log.entries import Rewound
from arroyo_dagster.model import Manifest
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.state.tables import MAX_FILES
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.operators import RunningTotal
from tests.engine.oracle import take_epochs
from tests.engine.test_pipelines import shown

LETTERS = pa.table({"k": ["a", "a", "b", "b"], "v": [1, 2, 3, 4]})


def times(*seconds: int) -> pa.Array:
    return pa.array([second * 1_000_000 for second in seconds], pa.timestamp("us"))


class TestATaskThatIsTriedAgain:
    def test_and_tells_another_subtask_something_else_is_found_out(self, tmp_path: Path) -> None:
        table = pa.table({"k": [f"key {number}" for number in range(100)], "v": [1] * 100})
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        stream = pipeline.source("rows", TableSource(table, [100], 2))
        stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
        tries: list[pa.Table] = []

        def mixed(messages: pa.Table) -> pa.Table:
            """What subtask 0 got from this try, and subtask 1 from one that had other rows to send."""
            tries.append(messages)
            mine = messages.filter(pc.equal(messages["subtask"], 0))
            others = tries[0].filter(pc.equal(tries[0]["subtask"], 1))
            return pa.concat_tables([mine, others])

        engine = InProcessEngine(pipeline)
        engine.disturb = mixed
        attempt = engine.begin()
        assert isinstance(attempt, Attempt)
        engine.run_stage(attempt, "totals", {})  # two tries that agree can be mixed
        other = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        changed = other.source("rows", TableSource(table.set_column(0, "k", pc.utf8_upper(table["k"])), [100], 2))
        changed.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
        again = InProcessEngine(other)
        again.disturb = mixed
        with pytest.raises(
            AttemptError, match="'totals': a task before the shuffle was tried again and gave out other"
        ):
            again.run_stage(attempt, "totals", {})


class TestDoingItAgain:
    def engine(self, tmp_path: Path) -> InProcessEngine:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=1)
        pipeline.source("rows", TableSource(LETTERS, [2, 4])).sink("out", ParquetSink(str(tmp_path / "out")))
        return InProcessEngine(pipeline, run_id="run 1")

    def test_a_run_that_begins_twice_has_one_attempt(self, tmp_path: Path) -> None:
        assert self.engine(tmp_path).begin() == self.engine(tmp_path).begin()

    def test_an_attempt_that_is_completed_twice_is_completed(self, tmp_path: Path) -> None:
        engine = self.engine(tmp_path)
        attempt = engine.begin()
        assert isinstance(attempt, Attempt)
        reports = [engine.run_stage(attempt, "out", {}), engine.run_stage(attempt, "out", {})]
        first = engine.complete(attempt, reports[:1])
        assert isinstance(first, Manifest)
        assert engine.complete(attempt, reports[1:]) == first
        engine.publish()
        assert len(shown(tmp_path / "out")) == 2

    def test_an_attempt_that_was_given_up_stays_so(self, tmp_path: Path) -> None:
        engine = self.engine(tmp_path)
        attempt = engine.begin()
        assert isinstance(attempt, Attempt)
        report = engine.run_stage(attempt, "out", {})
        with pytest.raises(OSError, match="power"), engine.guarded(attempt):
            raise OSError("power")
        late = engine.complete(attempt, [report])
        assert isinstance(late, Wait)
        assert late.reason.startswith("attempt 1 at epoch 1 came too late: attempt 1 at epoch 1 is not in flight")


class TestIdleness:
    def test_passes_through_operators(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        fast = TableSource(pa.table({"k": ["a"] * 6, "t": times(0, 100, 200, 300, 400, 500)}), [1, 2, 3, 4, 5, 6])
        slow = TableSource(pa.table({"k": ["a"], "t": times(0)}), [1])
        streams = [
            pipeline.source(name, source, event_time="t", idle_after="1 minute")
            .key_by("k")
            .tumble("1 second")
            .aggregate(f"{name}_counts", n=agg.count())
            for name, source in (("fast", fast), ("slow", slow))
        ]
        streams[0].union(streams[1]).key_by("k").tumble("10 seconds").aggregate("both", n=agg.sum("n")).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        marks = []
        for minute in range(6):
            at = pendulum.datetime(2026, 1, 1).add(minutes=2 * minute)
            engine = InProcessEngine(pipeline, clock=lambda at=at: at)  # type: ignore[misc]
            [taken] = take_epochs(engine, 1)
            marks.append({record.operator: record.watermark for record in taken.manifest.operators}["both"])
        assert marks == [0, *(second * 1_000_000 for second in (100, 200, 300, 400, 500))]
        assert [n for (n,) in shown(tmp_path / "out", "n")] == [1] * 5  # the slow one closes no window

    def test_is_no_reason_not_to_wait_for_a_source_with_a_backlog(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=1)
        fast = TableSource(pa.table({"k": ["a"] * 4, "t": times(0, 100, 200, 300)}), [1, 2, 3, 4])
        slow = TableSource(pa.table({"k": ["a"] * 2, "t": times(0, 250)}), [1, 1, 1, 2])
        streams = [
            pipeline.source(name, source, event_time="t", idle_after="1 minute")
            for name, source in (("fast", fast), ("slow", slow))
        ]
        streams[0].union(streams[1]).key_by("k").tumble("10 seconds").aggregate("both", n=agg.count()).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        marks = []
        for day in range(4):
            at = pendulum.datetime(2026, 1, 1).add(days=day)
            engine = InProcessEngine(pipeline, clock=lambda at=at: at)  # type: ignore[misc]
            [taken] = take_epochs(engine, 1)
            marks.append(taken.manifest.operators[0].watermark)
        assert marks == [0, 0, 0, 250_000_000]

    def test_an_input_without_event_time_holds_nothing_back_behind_an_operator_either(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=1)
        timed = pipeline.source(
            "timed", TableSource(pa.table({"k": ["a"] * 2, "t": times(5, 9)}), [1, 2]), event_time="t"
        )
        plain = pipeline.source("plain", TableSource(pa.table({"k": ["a"] * 2}), [1, 2])).process("passing", Passing())
        timed.key_by("k").process("both", Passing(), plain.key_by("k")).sink("out", ParquetSink(str(tmp_path / "out")))
        taken = take_epochs(InProcessEngine(pipeline), 2)
        marks = [{record.operator: record.watermark for record in epoch.manifest.operators}["both"] for epoch in taken]
        assert marks == [5_000_000, 9_000_000]

    def test_no_epoch_is_taken_while_all_is_quiet_if_that_is_wanted(self, tmp_path: Path) -> None:
        none = pendulum.duration(microseconds=1)
        pipeline = Pipeline("p", state_url=str(tmp_path / "s"), policy=CheckpointPolicy(skip_idle=True, interval=none))
        pipeline.source("rows", TableSource(LETTERS, [2, 4])).sink("out", ParquetSink(str(tmp_path / "out")))
        engine = InProcessEngine(pipeline)
        outcomes = [engine.run_epoch() for _ in range(3)]
        assert [type(outcome) for outcome in outcomes] == [Taken, Taken, Wait]
        assert outcomes[2] == Wait("no source has anything new since epoch 2")


class Passing(Operator):
    """Passes rows on."""

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        ctx.collect(batch.select(["k"]))


class TestTakenOutAndPutBack:
    def pipeline(self, tmp_path: Path, *names: str) -> Pipeline:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        for name in names:
            stream = pipeline.source(name, TableSource(LETTERS, [1, 2, 3, 4]))
            stream.key_by("k").process(f"{name}_totals", RunningTotal()).sink(
                f"{name}_out", ParquetSink(str(tmp_path / name))
            )
        return pipeline

    def test_sources_go_on_where_they_were_and_operators_with_what_they_had(self, tmp_path: Path) -> None:
        for names in (["one", "two"], ["one"], ["one"], ["one", "two"]):
            take_epochs(InProcessEngine(self.pipeline(tmp_path, *names)), 1)
        assert shown(tmp_path / "one", "k, total") == [("a", 1), ("a", 3), ("b", 3), ("b", 7)]
        assert shown(tmp_path / "two", "k, total") == [("a", 1), ("a", 3)]

    def test_a_source_that_goes_between_two_attempts_was_not_read(self, tmp_path: Path) -> None:
        engine = InProcessEngine(self.pipeline(tmp_path, "one", "two"))
        attempt = engine.begin()
        assert isinstance(attempt, Attempt)
        with pytest.raises(OSError, match="power"), engine.guarded(attempt):
            raise OSError("power")
        take_epochs(InProcessEngine(self.pipeline(tmp_path, "one")), 1)
        take_epochs(InProcessEngine(self.pipeline(tmp_path, "one", "two")), 1)
        assert shown(tmp_path / "one", "k, total") == [("a", 1), ("a", 3)]
        assert shown(tmp_path / "two", "k, total") == [("a", 1)]

    def test_a_rewind_waits_for_the_sink_that_has_something_to_retract(self, tmp_path: Path) -> None:
        engine = InProcessEngine(self.pipeline(tmp_path, "one", "two"))
        take_epochs(engine, 2)
        state = engine.state()
        assert isinstance(engine._log.append(state, Rewound(1, state.line.after(1), "a run that has ended")), Appended)
        with pytest.raises(
            ConfigurationError, match="epoch 2 has output for the sink 'two_out', which pipeline 'p' no"
        ):
            take_epochs(InProcessEngine(self.pipeline(tmp_path, "one")), 1)
        take_epochs(InProcessEngine(self.pipeline(tmp_path, "one", "two")), 1)
        assert shown(tmp_path / "two", "k, total") == [("a", 1), ("a", 3)]


class Noting(Operator):
    """Notes the batches it has seen where every subtask sees it, and says no when it has seen none."""

    notes = GlobalTable("notes", pa.schema([("subtask", pa.int64()), ("rows", pa.int64())]), ("subtask",))

    def tables(self) -> Sequence[GlobalTable]:
        return (self.notes,)

    def on_start(self, ctx: OperatorContext) -> None:
        self.rows = 0

    def process_batch(self, batch: pa.RecordBatch, ctx: OperatorContext, input: int = 0) -> None:
        self.rows += batch.num_rows
        ctx.table(self.notes).upsert(pa.table({"subtask": [ctx.subtask_index], "rows": [self.rows]}))

    def handle_checkpoint(self, barrier: CheckpointBarrier, ctx: OperatorContext) -> bool:
        return self.rows > 0


def test_a_global_table_has_few_files_whoever_writes_to_it(tmp_path: Path) -> None:
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=4)
    rows = TableSource(pa.table({"k": ["always the same"] * 30}), range(1, 31))
    pipeline.source("rows", rows).key_by("k").process("notes", Noting()).sink("out", ParquetSink(str(tmp_path / "out")))
    taken = take_epochs(InProcessEngine(pipeline), 30)
    assert max(len(list(epoch.manifest.files)) for epoch in taken) <= MAX_FILES + 1


def test_keys_of_different_types_are_refused_once_they_are_known(tmp_path: Path) -> None:
    class Untyped(TableSource):
        """Tells its columns only when there are rows."""

        @property
        def schema(self) -> Any:
            return None

        def schema_at(self, end: object) -> pa.Schema:
            return super().schema

    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
    left = pipeline.source("left", Untyped(pa.table({"k": [1]}), [1]))
    right = pipeline.source("right", Untyped(pa.table({"k": [1.0]}), [1]))
    left.key_by("k").process("both", Passing(), right.key_by("k")).sink("out", ParquetSink(str(tmp_path / "out")))
    with pytest.raises(ConfigurationError, match="the key is int64 in the rows of left, but double in those of right"):
        take_epochs(InProcessEngine(pipeline), 1)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_key_that_is_not_there_is_refused_at_any_parallelism(tmp_path: Path, parallelism: int) -> None:
    pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=parallelism)
    stream = pipeline.source("rows", TableSource(LETTERS, [4])).map_batches(lambda batch: batch.select(["v"]))
    stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
    with pytest.raises(AttemptError, match="the stream has no column 'k' to be keyed by; it has v"):
        take_epochs(InProcessEngine(pipeline), 1)


def test_state_and_output_on_s3(tmp_path: Path, s3_options: dict[str, Any]) -> None:
    results = []
    for place, options in ((f"s3://bucket/{tmp_path.name}", s3_options), (str(tmp_path), {})):
        pipeline = Pipeline("p", state_url=f"{place}/state", storage_options=options, parallelism=2)
        stream = pipeline.source("rows", TableSource(LETTERS, [1, 2, 3, 4]))
        sink = ParquetSink(f"{place}/out", storage_options=options)
        stream.key_by("k").process("totals", RunningTotal()).sink("out", sink)
        engine = InProcessEngine(pipeline)
        taken = take_epochs(engine, 4)
        assert engine.verify() == []
        results.append([sorted(file.digest for file in epoch.manifest.files) for epoch in taken])
    assert results[0] == results[1]
