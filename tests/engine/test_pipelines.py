"""Pipelines of every shape, in one process: several inputs and outputs, state by key, windows upon windows."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pendulum
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pendulum import DateTime

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.errors import AttemptError, ConfigurationError, DamagedObjectError
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.sources import FileSource
from arroyo_dagster.testing import InProcessEngine, TableSource
from tests.engine.operators import Forget, RunningTotal
from tests.engine.oracle import epochs_of, published, take_epochs, windows

MICROS = 1_000_000


def rows(count: int, keys: int = 10, seconds: int = 100, seed: int = 1, skew: float = 0.0) -> pa.Table:
    chance = random.Random(seed)
    hot = [f"key {chance.randrange(keys)}" if chance.random() >= skew else "hot" for _ in range(count)]
    times = [int((place / count * seconds - chance.random() * 4) * MICROS) for place in range(count)]
    return pa.table(
        {
            "k": hot,
            "v": [chance.randrange(100) for _ in range(count)],
            "t": pa.array(times, pa.timestamp("us", "UTC")),
        }
    )


def shown(directory: Path, columns: str = "*") -> list[tuple[Any, ...]]:
    if not list(directory.glob("*.parquet")):
        return []
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute(f"SELECT {columns} FROM '{directory}/*.parquet' ORDER BY ALL").fetchall()


class TestCustomOperator:
    @pytest.mark.parametrize("cuts", [[400], [100, 200, 300, 400], [0, 1, 2, 2, 3, 400], [399, 400]])
    @pytest.mark.parametrize("parallelism", [1, 3, 7])
    def test_totals_by_key_are_those_of_the_input(self, tmp_path: Path, cuts: list[int], parallelism: int) -> None:
        table = rows(400)
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=parallelism)
        stream = pipeline.source("rows", TableSource(table, cuts, splits=3))
        stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
        engine = InProcessEngine(pipeline)
        taken = take_epochs(engine, len(cuts))
        query = "SELECT k, sum(v) FROM input GROUP BY k ORDER BY k"
        with duckdb.connect() as connection:
            expected = connection.register("input", table).execute(query).fetchall()
            last = f"SELECT k, max_by(total, epoch) FROM '{tmp_path}/out/*.parquet' GROUP BY k ORDER BY k"
            assert connection.execute(last).fetchall() == expected
        assert sum(epoch.manifest.operators[0].metrics.get("rows seen", 0) for epoch in taken) == 400

    def test_a_change_of_parallelism_between_epochs_changes_nothing_else(self, tmp_path: Path) -> None:
        table, cuts = rows(600), [100, 200, 300, 400, 500, 600]
        results = []
        for name, scales in (("steady", [2] * 6), ("moving", [1, 4, 2, 7, 1, 3])):
            for scale in scales:
                pipeline = Pipeline(name, state_url=str(tmp_path / "state"), parallelism=scale)
                stream = pipeline.source("rows", TableSource(table, cuts), event_time="t", watermark_delay="4 seconds")
                stream.key_by("k").process("totals", RunningTotal()).sink(
                    "out", ParquetSink(str(tmp_path / name / "out"))
                )
                windowed = stream.key_by("k").tumble("10 seconds")
                windowed.aggregate("stats", n=agg.count(), v=agg.sum("v")).sink(
                    "windows", ParquetSink(str(tmp_path / name / "windows"))
                )
                engine = InProcessEngine(pipeline)
                take_epochs(engine, 1)
            assert engine.verify() == []
            results.append([shown(tmp_path / name / "out"), shown(tmp_path / name / "windows")])
        assert results[0] == results[1]
        assert all(results[0])

    def test_two_inputs_meet_by_key(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=3)
        letters = pa.table({"k": ["a", "b", "a", "c", "a", "b"]})
        forgets = pa.table({"name": ["x", "a", "a"]}).rename_columns(["k"])
        first = pipeline.source("letters", TableSource(letters, [2, 4, 6]))
        second = pipeline.source("forgets", TableSource(forgets, [1, 2, 3]))
        first.key_by("k").process("once", Forget(), second.key_by("k")).sink("out", ParquetSink(str(tmp_path / "out")))
        take_epochs(InProcessEngine(pipeline), 3)
        # Input 0 comes before input 1 within an epoch: `a` is forgotten at the end of epochs 2 and 3.
        assert [key for (key,) in shown(tmp_path / "out")] == ["a", "a", "b", "c"]

    def test_without_a_key_one_subtask_gets_everything(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=4)
        pipeline.source("rows", TableSource(rows(50), [25, 50], splits=4)).process("totals", RunningTotal()).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        taken = take_epochs(InProcessEngine(pipeline), 2)
        assert [epoch.manifest.operators[0].parallelism for epoch in taken] == [1, 1]
        assert sum(total for (total,) in shown(tmp_path / "out", "max_by(total, epoch) OVER (PARTITION BY k)")) > 0


class TestWindows:
    def test_a_skewed_key_and_empty_and_tiny_epochs(self, tmp_path: Path) -> None:
        table, cuts = rows(2000, skew=0.9), [0, 1, 2, 2, 900, 900, 1999, 2000]
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=3)
        stream = pipeline.source("rows", TableSource(table, cuts, 2), event_time="t", watermark_delay="4 seconds")
        aggregates: dict[str, Any] = {"n": agg.count(), "top": agg.max("v")}
        stream.key_by("k").tumble("10 seconds").aggregate("stats", **aggregates).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        take_epochs(InProcessEngine(pipeline), len(cuts))
        expected = windows(
            epochs_of(table, cuts), epochs=len(cuts), keys=["k"], time="t", size=10, delay=4, aggregates=aggregates
        )
        assert published(tmp_path / "out", ["k"], ["n", "top"]) == expected

    def test_windows_of_windows_close_in_the_same_epoch(self, tmp_path: Path) -> None:
        table = rows(1000, seconds=200)
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        stream = pipeline.source("rows", TableSource(table, [500, 1000], 2), event_time="t", watermark_delay="4 s")
        by_key = stream.key_by("k").tumble("10 seconds").aggregate("narrow", n=agg.count())
        by_key.key_by("k").tumble("30 seconds").aggregate("wide", n=agg.sum("n")).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        taken = take_epochs(InProcessEngine(pipeline), 2)
        assert taken[0].manifest.operators[0].watermark == taken[0].manifest.operators[1].watermark
        expected = windows(
            epochs_of(table, [500, 1000]),
            epochs=2,
            keys=["k"],
            time="t",
            size=30,
            delay=4,
            aggregates={"n": agg.count()},
        )
        assert published(tmp_path / "out", ["k"], ["n"]) == expected != []

    def test_nothing_is_left_of_what_stages_passed_to_each_other(self, tmp_path: Path) -> None:
        self.test_windows_of_windows_close_in_the_same_epoch(tmp_path)
        assert not list((tmp_path / "state").rglob("*.arrow"))


class TestTwoSources:
    def pipeline(self, tmp_path: Path, fast: TableSource, slow: TableSource, idle: str) -> Pipeline:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        streams = [
            pipeline.source(name, source, event_time="t", watermark_delay="4 seconds", idle_after=idle)
            for name, source in (("fast", fast), ("slow", slow))
        ]
        streams[0].union(streams[1]).key_by("k").tumble("10 seconds").aggregate("stats", n=agg.count()).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        return pipeline

    def test_the_watermark_is_that_of_the_slower_one(self, tmp_path: Path) -> None:
        fast, slow = rows(100, seconds=100, seed=1), rows(100, seconds=40, seed=2)
        engine = InProcessEngine(
            self.pipeline(tmp_path, TableSource(fast, [100]), TableSource(slow, [100]), "1 minute")
        )
        [taken] = take_epochs(engine, 1)
        marks = {source.source: source.watermark or 0 for source in taken.manifest.sources}
        assert taken.manifest.operators[0].watermark == marks["slow"] < marks["fast"]
        both = Counter(end.timestamp() for (end,) in shown(tmp_path / "out", "window_end"))
        assert max(both) <= marks["slow"] / MICROS < max(both) + 10

    def test_one_without_rows_holds_it_back_only_until_it_counts_as_idle(self, tmp_path: Path) -> None:
        now = pendulum.datetime(2026, 1, 1)
        clock = self.steps(now)
        fast = TableSource(rows(300, seconds=300), [100, 200, 300])
        slow = TableSource(rows(5, seconds=40), [5, 5, 5])
        pipeline = self.pipeline(tmp_path, fast, slow, "90 seconds")
        marks = []
        for _ in range(4):
            at = next(clock)
            engine = InProcessEngine(pipeline, clock=lambda at=at: at)  # type: ignore[misc]
            [taken] = take_epochs(engine, 1)
            marks.append((taken.manifest.operators[0].watermark, taken.manifest.sources[0].watermark))
        slow_mark = taken.manifest.sources[1].watermark
        assert [mark for mark, _ in marks[:2]] == [slow_mark, slow_mark]
        assert [mark for mark, _ in marks[2:]] == [fast_mark for _, fast_mark in marks[2:]]

    @staticmethod
    def steps(start: DateTime) -> Iterator[DateTime]:
        for minute in range(10):
            yield start.add(minutes=minute)


class TestFanOut:
    def test_every_reader_of_a_stream_sees_all_of_it(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        stream = pipeline.source("rows", TableSource(rows(100), [50, 100], 2))
        totals = stream.key_by("k").process("totals", RunningTotal())
        for name in ("first", "second"):
            totals.sink(name, ParquetSink(str(tmp_path / name)))
        stream.sink("raw", ParquetSink(str(tmp_path / "raw")))
        stream.union(stream).sink("twice", ParquetSink(str(tmp_path / "twice")))
        engine = InProcessEngine(pipeline)
        take_epochs(engine, 2)
        assert shown(tmp_path / "first") == shown(tmp_path / "second") != []
        assert len(shown(tmp_path / "raw")) == 100
        assert len(shown(tmp_path / "twice")) == 200
        assert engine.verify() == []


class TestIncrementalState:
    def test_an_epoch_that_changes_one_key_in_a_hundred_writes_about_a_hundredth(self, tmp_path: Path) -> None:
        everything = pa.table({"k": [f"key {number}" for number in range(50_000)], "v": [1] * 50_000})
        table = pa.concat_tables([everything, everything.slice(1000, 500)])
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        stream = pipeline.source("rows", TableSource(table, [50_000, 50_500]))
        stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
        first, second = take_epochs(InProcessEngine(pipeline), 2)
        whole = sum(file.bytes for file in first.manifest.files)
        old = {file.path for file in first.manifest.files}
        delta = sum(file.bytes for file in second.manifest.files if file.path not in old)
        assert old <= {file.path for file in second.manifest.files}
        assert delta < whole / 25

    def test_a_flipped_byte_is_found_when_state_is_restored(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=1)
        stream = pipeline.source("rows", TableSource(rows(100), [50, 100]))
        stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
        engine = InProcessEngine(pipeline)
        [taken] = take_epochs(engine, 1)
        [file] = taken.manifest.files
        path = tmp_path / "state" / "p" / file.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedObjectError, match=file.path):
            take_epochs(engine, 1)
        assert engine.state().head == 1
        assert [problem.split(" ")[0] for problem in engine.verify()] == [str(path)]


class TestTrouble:
    def test_a_failed_attempt_commits_nothing_and_the_next_one_has_the_same_plan(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"), parallelism=2)
        broken = tmp_path / "broken"

        def function(batch: pa.RecordBatch) -> pa.RecordBatch:
            if broken.exists():
                raise OSError("the disk is on fire")
            return batch

        stream = pipeline.source("rows", TableSource(rows(100), [50, 100]))
        stream.map_batches(function).key_by("k").process("totals", RunningTotal()).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        engine = InProcessEngine(pipeline)
        broken.touch()
        with pytest.raises(AttemptError, match=r"map_batches\(function\) before totals raised OSError: the disk"):
            take_epochs(engine, 1)
        state = engine.state()
        assert (state.head, state.failures.count, state.in_flight) == (0, 1, None)
        assert "the disk is on fire" in state.failures.reason
        broken.unlink()
        attempt = engine.begin()
        assert getattr(attempt, "number", None) == 2
        assert getattr(attempt, "plan", None) == state.plan

    def test_a_changed_number_of_key_groups_is_refused(self, tmp_path: Path) -> None:
        for groups in (16, 32):
            pipeline = Pipeline("p", state_url=str(tmp_path / "state"), key_groups=groups, parallelism=1)
            stream = pipeline.source("rows", TableSource(rows(10), [5, 10]))
            stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(tmp_path / "out")))
            engine = InProcessEngine(pipeline)
            if groups == 16:
                take_epochs(engine, 1)
        with pytest.raises(ConfigurationError, match="begun with 16 key groups, which cannot change: set"):
            take_epochs(engine, 1)

    def test_a_time_that_no_calendar_has_is_named(self, tmp_path: Path) -> None:
        far = pa.table({"k": ["a"], "t": pa.array([1 << 60], pa.timestamp("us"))})
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"))
        stream = pipeline.source("rows", TableSource(far, [1]), event_time="t")
        stream.key_by("k").tumble("1 day").aggregate("stats", n=agg.count()).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        with pytest.raises(AttemptError, match="operator 'stats': the latest row of its input happened 1152921504606"):
            take_epochs(InProcessEngine(pipeline), 1)

    def test_an_event_time_that_turns_out_to_be_a_text_is_named_before_anything_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "rows").mkdir()
        pq.write_table(pa.table({"k": ["a"], "t": ["noon"]}), tmp_path / "rows" / "1.parquet")
        pipeline = Pipeline("p", state_url=str(tmp_path / "state"))
        stream = pipeline.source("rows", FileSource(str(tmp_path / "rows")), event_time="t")
        stream.key_by("k").tumble("1 day").aggregate("stats", n=agg.count()).sink(
            "out", ParquetSink(str(tmp_path / "out"))
        )
        with pytest.raises(
            ConfigurationError, match="source 'rows': the event time 't' is string; make it a timestamp"
        ):
            take_epochs(InProcessEngine(pipeline), 1)
