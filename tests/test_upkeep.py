"""Cleaning and rewinding, without Dagster."""

from collections.abc import Callable
from pathlib import Path

import pytest

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.controller import Run, RunKind, StartCleanup, Wait
from arroyo_dagster.engine import Engine
from arroyo_dagster.errors import DamagedObjectError, StorageError
from arroyo_dagster.log.entries import EpochPinned, ReplayStarted
from arroyo_dagster.log.store import ObjectStorage
from arroyo_dagster.model import EpochSet, Manifest, ObjectPath
from arroyo_dagster.retention import Retention
from arroyo_dagster.sinks import ParquetSink
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport
from arroyo_dagster.testing import Crash, InProcessEngine, TableSource
from arroyo_dagster.upkeep import Cleaned, clean, may_clean, plan, rewind
from tests.engine.operators import RunningTotal
from tests.engine.oracle import take_epochs
from tests.engine.test_pipelines import rows, shown
from tests.facts import NOON

KEEP_2 = Retention(keep_last=2)
KEPT = EpochSet.of([3, 4, 5])  # and 3, from which a replay of 4 starts


def engine_in(
    directory: Path, run_id: str | None = None, on_step: Callable[[str], None] = lambda step: None
) -> InProcessEngine:
    """Running totals, of which every epoch's file is needed for long, and windows, whose files soon are not."""
    pipeline = Pipeline("p", state_url=str(directory / "state"), parallelism=2)
    stream = pipeline.source("rows", TableSource(rows(140, keys=4), range(20, 160, 20)), event_time="t")
    stream.key_by("k").process("totals", RunningTotal()).sink("out", ParquetSink(str(directory / "out")))
    windows = stream.key_by("k").tumble("10 seconds").aggregate("windows", n=agg.count())
    windows.sink("closed", ParquetSink(str(directory / "closed")))
    return InProcessEngine(pipeline, run_id=run_id, on_step=on_step)


@pytest.fixture
def engine(tmp_path: Path) -> InProcessEngine:
    engine = engine_in(tmp_path)
    take_epochs(engine, 5)
    return engine


def cleaned(engine: Engine, retention: Retention = KEEP_2, run_id: str | None = None) -> Cleaned:
    done = clean(engine, plan(engine, retention), run_id)
    assert isinstance(done, Cleaned), done
    return done


def objects(directory: Path) -> set[str]:
    """Everything below the epochs."""
    state = directory / "state" / "p"
    return {str(path.relative_to(state)) for path in (state / "epochs").rglob("*") if path.is_file()}


def needed(engine: Engine) -> set[str]:
    """What the kept epochs need: their manifests, and what these name."""
    state = engine.state()
    return {
        str(path)
        for epoch in state.kept
        for path in (state.manifest_of(epoch), *(file.path for file in engine.manifest(epoch).files))
    }


def staged(engine: InProcessEngine) -> tuple[Attempt, list[StageReport]]:
    """An attempt of which every stage is done."""
    attempt = engine.begin()
    assert isinstance(attempt, Attempt)
    reports: dict[str, StageReport] = {}
    for stage in engine.stages:
        reports[stage.name] = engine.run_stage(attempt, stage.name, reports)
    return attempt, [*reports.values()]


class TestPlan:
    def test_changes_nothing(self, engine: InProcessEngine, tmp_path: Path) -> None:
        before, state = objects(tmp_path), engine.state()
        planned = plan(engine, KEEP_2)
        assert planned.removes == EpochSet.of([1, 2])
        assert planned.files
        assert (objects(tmp_path), engine.state()) == (before, state)

    def test_that_is_out_of_date_is_not_carried_out(self, engine: InProcessEngine, tmp_path: Path) -> None:
        planned, before = plan(engine, KEEP_2), objects(tmp_path)
        engine.record(EpochPinned(1, "audit"))
        refused = clean(engine, planned)
        assert isinstance(refused, Wait)
        assert "plan again" in refused.reason
        assert objects(tmp_path) == before

    def test_with_a_lost_manifest_of_a_kept_epoch_is_refused(self, engine: InProcessEngine) -> None:
        path = engine.state().manifest_of(5)
        engine.store.delete(path)
        with pytest.raises(DamagedObjectError, match=r"attempt-1/manifest.json, the manifest of epoch 5, is lost"):
            plan(engine, KEEP_2)

    def test_with_a_damaged_manifest_is_refused(self, engine: InProcessEngine) -> None:
        path = engine.state().manifest_of(1)
        engine.store.delete(path)
        engine.store.create(path, b"nonsense")
        with pytest.raises(DamagedObjectError, match="is damaged or not ours"):
            plan(engine, KEEP_2)


class TestClean:
    def test_leaves_just_what_the_kept_epochs_need(self, engine: InProcessEngine, tmp_path: Path) -> None:
        before, output = objects(tmp_path), shown(tmp_path / "out")
        sizes = {name: (tmp_path / "state" / "p" / name).stat().st_size for name in before}
        done = cleaned(engine)
        gone = {name for name in before - objects(tmp_path) if name.endswith(".parquet")}
        assert engine.state().kept == KEPT
        assert objects(tmp_path) == needed(engine) < before
        assert (done.files, done.bytes) == (len(gone), sum(sizes[name] for name in gone))
        assert done.undeleted == ()
        assert engine.verify() == []
        assert shown(tmp_path / "out") == output

    def test_is_followed_by_epochs_as_if_nothing_had_been(self, engine: InProcessEngine, tmp_path: Path) -> None:
        undisturbed = engine_in(tmp_path / "undisturbed")
        take_epochs(undisturbed, 7)
        cleaned(engine, Retention(keep_last=1))
        take_epochs(engine, 2)
        assert shown(tmp_path / "out") == shown(tmp_path / "undisturbed" / "out")

    def test_takes_what_dead_attempts_have_written(self, engine: InProcessEngine, tmp_path: Path) -> None:
        def die(step: str) -> None:
            if step == "manifest":
                raise Crash("the process is killed")

        with pytest.raises(Crash):
            engine_in(tmp_path, "a-run-that-is-gone", die).run_epoch(policy=engine.pipeline.policy.at_once())
        take_epochs(engine, 1)
        assert engine.state().attempt_of(6) == 2
        dead = {name for name in objects(tmp_path) if name.startswith("epochs/00000000000000000006/attempt-1/")}
        assert len(dead) > 1
        cleaned(engine)
        assert objects(tmp_path) == needed(engine)

    def test_leaves_what_a_re_execution_may_go_on_with(self, engine: InProcessEngine, tmp_path: Path) -> None:
        def die(step: str) -> None:
            if step == "manifest":
                raise Crash("the process is killed")

        attempt, reports = staged(engine_in(tmp_path, "run 1"))
        with pytest.raises(Crash):
            engine_in(tmp_path, "run 1", die).complete(attempt, reports)
        engine.give_up(attempt, "its run is gone")
        cleaned(engine)
        again = engine_in(tmp_path, "run 2")
        retry = again.go_on(attempt, again=True)
        assert isinstance(retry, Attempt)
        assert isinstance(again.complete(retry, reports), Manifest)
        again.publish()
        assert again.verify() == []
        cleaned(engine)
        assert objects(tmp_path) == needed(engine)

    def test_of_an_epoch_does_not_let_a_dead_attempt_at_it_pass_for_complete(
        self, engine: InProcessEngine, tmp_path: Path
    ) -> None:
        dead, _ = staged(engine_in(tmp_path, "run 1"))
        engine.give_up(dead, "its run is gone")
        take_epochs(engine, 4)
        assert engine.state().attempt_of(6) == 2
        cleaned(engine)
        late = engine_in(tmp_path, "run 1").go_on(dead, again=False)
        assert isinstance(late, Wait)
        assert "there is nothing left to do" in late.reason

    def test_that_was_cleaned_before_does_nothing(self, engine: InProcessEngine, tmp_path: Path) -> None:
        cleaned(engine)
        before = objects(tmp_path)
        again = plan(engine, KEEP_2)
        assert (list(again.removes), again.files, again.manifests) == ([], (), ())
        done = cleaned(engine)
        assert (done.files, done.bytes, objects(tmp_path)) == (0, 0, before)

    def test_goes_on_when_a_file_cannot_be_deleted(
        self, engine: InProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stubborn = plan(engine, KEEP_2).files[0].path
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStorage, "delete", refusing(lambda path: path == stubborn))
            done = cleaned(engine)
        assert done.undeleted == (f"access to {stubborn} denied",)
        assert done.files == len(done.plan.files) - 1
        manifests = {name for name in objects(tmp_path) if name.endswith("manifest.json")}
        assert len(manifests) == 5  # they lead to the file that is left
        assert stubborn in objects(tmp_path)
        cleaned(engine)
        assert objects(tmp_path) == needed(engine)

    def test_may_die_anywhere_and_the_next_one_brings_it_to_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deaths = 0
        while True:
            directory = tmp_path / str(deaths)
            engine = engine_in(directory)
            take_epochs(engine, 5)
            output = shown(directory / "out")
            planned = plan(engine, KEEP_2)
            with monkeypatch.context() as patch:
                left = dying_after(patch, deaths)
                try:
                    clean(engine, planned, "a-run-that-is-gone")
                except Crash:
                    assert left[0] < 0
                else:
                    break
            assert engine_in(directory).verify() == []  # at any moment
            another = engine_in(directory)
            assert may_clean(another, lambda _: []) == StartCleanup() or still_failing(another)
            cleaned(another)
            assert another.state().kept == KEPT
            assert objects(directory) == needed(another)
            assert another.verify() == []
            assert shown(directory / "out") == output
            deaths += 1
        assert deaths > 6


def refusing(which: Callable[[ObjectPath], bool]) -> Callable[[ObjectStorage, ObjectPath], None]:
    delete = ObjectStorage.delete

    def deletes(self: ObjectStorage, path: ObjectPath) -> None:
        if which(path):
            raise StorageError(f"access to {path} denied")
        delete(self, path)

    return deletes


def dying_after(patch: pytest.MonkeyPatch, calls: int) -> list[int]:
    """Let the process die at a call that changes something on storage, so that no later one has an effect either."""
    left = [calls]
    for name in ("create", "delete"):
        method = getattr(ObjectStorage, name)

        def deadly(self: ObjectStorage, *args: object, method: Callable[..., object] = method) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Crash("the process is killed")
            return method(self, *args)

        patch.setattr(ObjectStorage, name, deadly)
    return left


def still_failing(engine: Engine) -> bool:
    """Whether what was found dead is on record, so that only the back-off is in the way."""
    state = engine.state()
    return state.cleanup is None and state.cleanup_failures.count == 1


class TestMayClean:
    def test_once_there_is_an_epoch(self, tmp_path: Path) -> None:
        engine = engine_in(tmp_path)
        assert may_clean(engine, lambda _: []) == Wait("there is no epoch yet, so there is nothing to clean")
        take_epochs(engine, 1)
        assert may_clean(engine, lambda _: []) == StartCleanup()

    def test_not_while_a_run_of_a_checkpoint_lives(self, engine: InProcessEngine) -> None:
        run = Run("3f2a9c1d-7b5e", RunKind.CHECKPOINT, NOON.add(years=100))
        assert may_clean(engine, lambda _: [run]) == Wait("checkpoint run 3f2a9c1d is active; cleaning waits for it")

    def test_not_while_an_attempt_is_in_flight(self, engine: InProcessEngine, tmp_path: Path) -> None:
        engine_in(tmp_path, "a-run").begin()
        assert may_clean(engine, lambda _: []) == Wait("epoch 6 is being taken; cleaning waits for it")

    def test_after_a_replay_whose_run_is_gone_was_given_up(self, engine: InProcessEngine) -> None:
        engine.record(ReplayStarted(4, 1, "a-run-that-is-gone"))
        assert may_clean(engine, lambda _: []) == StartCleanup()
        assert engine.state().replays == ()

    def test_not_while_a_replay_lives(self, engine: InProcessEngine) -> None:
        engine.record(ReplayStarted(4, 1, "a-run"))
        run = Run("a-run", RunKind.REPLAY, NOON)
        assert may_clean(engine, lambda _: [run]) == Wait("epoch 4 is being replayed; cleaning waits for it")


class TestRewind:
    def test_retracts_output_and_the_next_epochs_process_the_same_rows(
        self, engine: InProcessEngine, tmp_path: Path
    ) -> None:
        whole = shown(tmp_path / "out", "k, total")
        state = rewind(engine, 2)
        assert not isinstance(state, Wait)
        assert (state.head, state.superseded, state.sinks) == (2, EpochSet.of([3, 4, 5]), None)
        undisturbed = engine_in(tmp_path / "undisturbed")
        take_epochs(undisturbed, 2)
        assert shown(tmp_path / "out") == shown(tmp_path / "undisturbed" / "out")
        take_epochs(engine, 3)
        assert shown(tmp_path / "out", "k, total") == whole
        assert engine.verify() == []

    def test_to_where_it_stands_changes_nothing(self, engine: InProcessEngine, tmp_path: Path) -> None:
        whole = shown(tmp_path / "out")
        state = rewind(engine, 5)
        assert not isinstance(state, Wait)
        assert state.superseded == EpochSet()
        assert shown(tmp_path / "out") == whole

    def test_leaves_work_for_others_when_a_sink_fails(
        self, engine: InProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise StorageError("the warehouse is closed")

        with monkeypatch.context() as patch:
            patch.setattr(ParquetSink, "retract", fail)
            with pytest.raises(StorageError, match="the warehouse is closed"):
                rewind(engine, 2)
        state = engine.state()
        assert state.head == 2
        assert state.sinks
        assert state.sinks.failures.count == 1
        engine.publish()
        assert engine.state().sinks is None
        assert engine.verify() == []

    def test_to_an_epoch_that_is_not_there_is_refused(self, engine: InProcessEngine) -> None:
        assert rewind(engine, 9) == Wait("epoch 9 cannot be rewound to; live epochs are 1-5")

    def test_of_what_was_cleaned_away_superseded_is_retracted_too(
        self, engine: InProcessEngine, tmp_path: Path
    ) -> None:
        engine.record(EpochPinned(1, "start"))
        cleaned(engine, Retention(keep_last=1))
        rewind(engine, 1)
        undisturbed = engine_in(tmp_path / "undisturbed")
        take_epochs(undisturbed, 1)
        assert shown(tmp_path / "out") == shown(tmp_path / "undisturbed" / "out")
