"""Every check fails when what it looks at is wrong, and names it."""

from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from arroyo_dagster.engine import Engine
from arroyo_dagster.log import Store
from arroyo_dagster.log.entries import ReplayFinished, ReplayOutcome
from arroyo_dagster.model import FileEntry, Manifest, ObjectPath, OperatorRecord, StagedOutput, TableFiles
from arroyo_dagster.orchestration.checks import Epoch, checks_of, replay_result, results, specs_of_checks
from arroyo_dagster.orchestration.deployment import Deployment
from tests.facts import NOON, after, replay, with_epochs
from tests.orchestration.helpers import ASSETS, create_object, deployment_of, pipeline_in, take

OF_OPERATORS = {"aligned", "files_whole", "watermark_monotonic", "state_chain"}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    pipeline = pipeline_in(tmp_path)
    take(pipeline, 2)
    return deployment_of(pipeline)


@pytest.fixture
def epoch(deployment: Deployment) -> Epoch:
    engine = Engine(deployment.pipeline)
    return Epoch(engine.manifest(2), engine.manifest(1), engine.store)


def problems(deployment: Deployment, epoch: Epoch) -> dict[tuple[str, str], str]:
    """What every check of every asset has to say that has something to say."""
    found = {}
    for node in deployment.nodes:
        for result in results(node, deployment.specs[node.name].key, [epoch]):
            assert result.passed == (result.description is None)
            if result.description:
                found[node.name, str(result.check_name)] = result.description
    return found


def with_operator(manifest: Manifest, name: str, **changes: object) -> Manifest:
    def changed(record: OperatorRecord) -> OperatorRecord:
        return replace(record, **changes) if record.operator == name else record  # type: ignore[arg-type]

    return replace(manifest, operators=tuple(map(changed, manifest.operators)))


def with_files(manifest: Manifest, operator: str, files: tuple[FileEntry, ...]) -> Manifest:
    def changed(table: TableFiles) -> TableFiles:
        return replace(table, files=files) if table.operator == operator else table

    return replace(manifest, tables=tuple(map(changed, manifest.tables)))


def files_of(manifest: Manifest, operator: str) -> tuple[FileEntry, ...]:
    [table] = [table for table in manifest.tables if table.operator == operator]
    return table.files


def record_of(manifest: Manifest, operator: str) -> OperatorRecord:
    [record] = [record for record in manifest.operators if record.operator == operator]
    return record


def test_every_operator_and_every_sink_right_behind_one_is_checked(deployment: Deployment) -> None:
    found = {node.name: {*checks_of(node)} for node in deployment.nodes}
    assert found == {
        "totals": OF_OPERATORS,
        "stats": OF_OPERATORS,
        "running": {"rows_conserved"},
        "windows": {"rows_conserved"},
        "stats_late": set(),
        "raw": set(),
    }
    for node in deployment.nodes:
        specs = specs_of_checks(node, deployment.specs[node.name].key)
        assert {spec.name for spec in specs} == found[node.name] | {"replay_identical"}
        assert all(spec.description for spec in specs)


def test_a_sound_epoch_passes_them_all(deployment: Deployment, epoch: Epoch) -> None:
    assert problems(deployment, epoch) == {}
    assert problems(deployment, replace(epoch, manifest=epoch.parent, parent=None)) == {}  # type: ignore[arg-type]


class TestAligned:
    def test_fails_when_a_subtask_was_not_aligned(self, deployment: Deployment, epoch: Epoch) -> None:
        spans = tuple(
            span for span in epoch.manifest.spans if (span.stage, span.step, span.subtask) != ("stats", "align", 1)
        )
        assert problems(deployment, replace(epoch, manifest=replace(epoch.manifest, spans=spans))) == {
            ("stats", "aligned"): "epoch 2: of 2 subtasks, these were aligned: [0]"
        }

    def test_fails_when_a_subtask_was_aligned_twice(self, deployment: Deployment, epoch: Epoch) -> None:
        [again] = [
            span for span in epoch.manifest.spans if (span.stage, span.step, span.subtask) == ("stats", "align", 1)
        ]
        manifest = replace(epoch.manifest, spans=(*epoch.manifest.spans, again))
        assert problems(deployment, replace(epoch, manifest=manifest)) == {
            ("stats", "aligned"): "epoch 2: of 2 subtasks, these were aligned: [0, 1, 1]"
        }

    def test_fails_when_rows_were_lost_on_the_way(self, deployment: Deployment, epoch: Epoch) -> None:
        manifest = with_operator(epoch.manifest, "totals", rows_in=41)
        assert problems(deployment, replace(epoch, manifest=manifest)) == {
            ("totals", "aligned"): "epoch 2: 41 rows were sent, but 40 by the count of the subtasks"
        }

    def test_fails_when_rows_were_lost_behind_the_operator(self, deployment: Deployment, epoch: Epoch) -> None:
        emitted = record_of(epoch.manifest, "totals").rows_out
        found = problems(deployment, replace(epoch, manifest=with_operator(epoch.manifest, "totals", rows_out=99)))
        assert found == {
            ("totals", "aligned"): f"epoch 2: 99 rows were emitted, but {emitted} by the count of the subtasks",
            ("running", "rows_conserved"): f"epoch 2: totals has emitted 99 rows, and {emitted} were published",
        }

    def test_fails_when_the_operator_is_not_in_the_manifest(self, deployment: Deployment, epoch: Epoch) -> None:
        others = tuple(record for record in epoch.manifest.operators if record.operator != "stats")
        found = problems(deployment, replace(epoch, manifest=replace(epoch.manifest, operators=others)))
        assert found["stats", "aligned"] == "epoch 2: the operator has no record in the manifest"


class TestFilesWhole:
    def new_file(self, epoch: Epoch) -> FileEntry:
        own = "epochs/00000000000000000002/"
        return next(file for file in files_of(epoch.manifest, "totals") if file.path.startswith(own))

    def test_fails_when_a_byte_has_flipped(self, deployment: Deployment, epoch: Epoch) -> None:
        file = self.new_file(epoch)
        [data] = epoch.store.read([file.path])
        assert data
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        create_object(deployment.pipeline, file.path, flipped)
        found = problems(deployment, epoch)
        assert list(found) == [("totals", "files_whole")]
        assert file.path in found["totals", "files_whole"]

    def test_fails_when_a_file_is_missing(self, deployment: Deployment, epoch: Epoch) -> None:
        file = self.new_file(epoch)
        store: Store = epoch.store
        store.delete(file.path)
        found = problems(deployment, epoch)
        assert list(found) == [("totals", "files_whole")]
        assert file.path in found["totals", "files_whole"]

    def test_names_every_file_that_is_not_whole(self, deployment: Deployment, epoch: Epoch) -> None:
        files = [file for file in files_of(epoch.manifest, "totals") if "00000002/" in file.path]
        assert len(files) == 2
        for file in files:
            create_object(deployment.pipeline, file.path, b"nonsense")
        text = problems(deployment, epoch)["totals", "files_whole"]
        assert all(file.path in text for file in files)


class TestWatermarkMonotonic:
    def test_fails_when_event_time_went_back(self, deployment: Deployment, epoch: Epoch) -> None:
        assert epoch.parent
        before = record_of(epoch.parent, "stats").watermark
        assert before
        manifest = with_operator(epoch.manifest, "stats", watermark=before - 1)
        assert problems(deployment, replace(epoch, manifest=manifest)) == {
            ("stats", "watermark_monotonic"): (
                f"epoch 2: the watermark was {before} microseconds, and is {before - 1} now"
            )
        }

    def test_fails_when_event_time_is_lost(self, deployment: Deployment, epoch: Epoch) -> None:
        manifest = with_operator(epoch.manifest, "stats", watermark=None)
        [(check, text)] = problems(deployment, replace(epoch, manifest=manifest)).items()
        assert check == ("stats", "watermark_monotonic")
        assert text.endswith("and is None now")

    def test_passes_when_it_stands_still(self, deployment: Deployment, epoch: Epoch) -> None:
        assert epoch.parent
        manifest = with_operator(epoch.manifest, "stats", watermark=record_of(epoch.parent, "stats").watermark)
        assert problems(deployment, replace(epoch, manifest=manifest)) == {}


class TestStateChain:
    def test_fails_when_a_file_is_of_unknown_origin(self, deployment: Deployment, epoch: Epoch) -> None:
        path = ObjectPath("epochs/00000000000000000001/attempt-7/totals/totals/x.parquet")
        stranger = replace(files_of(epoch.manifest, "totals")[0], path=path)
        manifest = with_files(epoch.manifest, "totals", (*files_of(epoch.manifest, "totals"), stranger))
        assert problems(deployment, replace(epoch, manifest=manifest)) == {
            ("totals", "state_chain"): f"epoch 2: {path} is neither of this epoch nor of its parent"
        }

    @pytest.mark.parametrize("changed", ["digest", "checksum"])
    def test_fails_when_an_inherited_file_is_another_one_by_now(
        self, deployment: Deployment, epoch: Epoch, changed: str
    ) -> None:
        assert epoch.parent
        inherited = files_of(epoch.parent, "totals")[0]
        tampered = replace(inherited, **{changed: "0" * 32})  # type: ignore[arg-type]
        manifest = with_files(epoch.manifest, "totals", (*files_of(epoch.manifest, "totals"), tampered))
        assert problems(deployment, replace(epoch, manifest=manifest)) == {
            ("totals", "state_chain"): f"epoch 2: {inherited.path} is neither of this epoch nor of its parent"
        }

    def test_fails_when_there_is_no_parent_to_inherit_from(self, deployment: Deployment, epoch: Epoch) -> None:
        assert epoch.parent
        inherited = files_of(epoch.parent, "totals")[0]
        manifest = with_files(epoch.manifest, "totals", (inherited,))
        assert ("totals", "state_chain") in problems(deployment, replace(epoch, manifest=manifest, parent=None))


class TestRowsConserved:
    def test_fails_when_output_is_missing(self, deployment: Deployment, epoch: Epoch) -> None:
        def changed(output: StagedOutput) -> StagedOutput:
            return replace(output, files=output.files[1:]) if output.sink == "running" else output

        manifest = replace(epoch.manifest, staged=tuple(map(changed, epoch.manifest.staged)))
        [(check, text)] = problems(deployment, replace(epoch, manifest=manifest)).items()
        assert check == ("running", "rows_conserved")
        emitted = record_of(epoch.manifest, "totals").rows_out
        published = sum(f.rows for out in manifest.staged if out.sink == "running" for f in out.files)
        assert text == f"epoch 2: totals has emitted {emitted} rows, and {published} were published"
        assert published < emitted


class TestReplay:
    KEY = dg.AssetKey(["p", ASSETS[0]])

    def test_that_differed_fails_until_it_is_identical(self) -> None:
        state = with_epochs(3, at=NOON)
        assert replay_result(self.KEY, state).passed
        state = after(state, replay(state, 2))
        state = after(state, ReplayFinished(2, 1, ReplayOutcome.DIFFERENT, ("output raw: 3 rows then, 4 now",)))
        failed = replay_result(self.KEY, state)
        assert not failed.passed
        assert failed.description == "the latest replays of epochs 2 were different"
        state = after(state, replay(state, 2))
        state = after(state, ReplayFinished(2, 2, ReplayOutcome.IDENTICAL))
        assert replay_result(self.KEY, state).passed


def test_problems_of_several_epochs_are_told_together(deployment: Deployment, epoch: Epoch) -> None:
    assert epoch.parent
    first = Epoch(with_operator(epoch.parent, "totals", rows_in=7), None, epoch.store)
    second = replace(epoch, manifest=with_operator(epoch.manifest, "totals", rows_in=8))
    [totals] = [node for node in deployment.nodes if node.name == "totals"]
    [aligned] = [
        result for result in results(totals, dg.AssetKey("x"), [first, second]) if result.check_name == "aligned"
    ]
    assert aligned.description == (
        "epoch 1: 7 rows were sent, but 40 by the count of the subtasks; "
        "epoch 2: 8 rows were sent, but 40 by the count of the subtasks"
    )
