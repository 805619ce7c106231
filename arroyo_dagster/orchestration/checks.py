"""Asset checks: what must be true of every epoch, looked at once more after it was committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import dagster as dg

from arroyo_dagster.dataflow.graph import OperatorNode, SinkNode
from arroyo_dagster.errors import ArroyoDagsterError
from arroyo_dagster.log import PipelineState, Store, names
from arroyo_dagster.model import FileEntry, Manifest
from arroyo_dagster.state.files import read_verified


@dataclass(frozen=True, slots=True)
class Epoch:
    """What there is to check: an epoch's manifest, its parent's, and the storage with its files."""

    manifest: Manifest
    parent: Manifest | None
    store: Store


REPLAYED = "replay_identical"

Problems: TypeAlias = Iterator[str]


def aligned(node: OperatorNode, epoch: Epoch) -> Problems:
    """Every subtask was aligned once, and the rows of all subtasks are those that were sent and emitted."""
    record = next((record for record in epoch.manifest.operators if record.operator == node.name), None)
    if record is None:
        yield "the operator has no record in the manifest"
        return
    spans = (span for span in epoch.manifest.spans if (span.stage, span.step) == (node.name, "align"))
    subtasks = sorted(span.subtask for span in spans)
    if subtasks != list(range(record.parallelism)):
        yield f"of {record.parallelism} subtasks, these were aligned: {subtasks}"
    for what, total, parts in (
        ("sent", record.rows_in, [subtask.rows_in for subtask in record.subtasks]),
        ("emitted", record.rows_out, [subtask.rows_out for subtask in record.subtasks]),
    ):
        if sum(parts) != total:
            yield f"{total} rows were {what}, but {sum(parts)} by the count of the subtasks"


def files_whole(node: OperatorNode, epoch: Epoch) -> Problems:
    """Every file of state that the epoch has written is there, with the bytes that its checksum covers."""
    for file in _new_files(node, epoch.manifest):
        try:
            read_verified(epoch.store, file)
        except ArroyoDagsterError as error:
            yield str(error)


def watermark_monotonic(node: OperatorNode, epoch: Epoch) -> Problems:
    """Event time has not gone back since the parent epoch."""
    before, now = (_watermark(node, manifest) for manifest in (epoch.parent, epoch.manifest))
    if before is not None and (now is None or now < before):
        yield f"the watermark was {before} microseconds, and is {now} now"


def state_chain(node: OperatorNode, epoch: Epoch) -> Problems:
    """Every file of state is new in this epoch, or stands in the parent's manifest with the same digest."""
    new = {file.path for file in _new_files(node, epoch.manifest)}
    inherited = {(file.path, file.digest, file.checksum) for file in _files(node, epoch.parent)}
    for file in _files(node, epoch.manifest):
        if file.path not in new and (file.path, file.digest, file.checksum) not in inherited:
            yield f"{file.path} is neither of this epoch nor of its parent"


def rows_conserved(node: SinkNode, epoch: Epoch) -> Problems:
    """The sink has published as many rows as its operator has emitted."""
    assert isinstance(node.stream, OperatorNode)
    emitted = sum(r.rows_out for r in epoch.manifest.operators if r.operator == node.stream.name)
    published = sum(f.rows for output in epoch.manifest.staged if output.sink == node.name for f in output.files)
    if emitted != published:
        yield f"{node.stream.name} has emitted {emitted} rows, and {published} were published"


Check: TypeAlias = Callable[..., Problems]

_OF_OPERATORS: Mapping[str, Check] = {
    check.__name__: check for check in (aligned, files_whole, watermark_monotonic, state_chain)
}
_OF_SINKS: Mapping[str, Check] = {rows_conserved.__name__: rows_conserved}


def checks_of(node: OperatorNode | SinkNode) -> Mapping[str, Check]:
    """The checks of an asset. Rows can be counted only where nothing stands between a sink and its operator."""
    if isinstance(node, OperatorNode):
        return _OF_OPERATORS
    return _OF_SINKS if isinstance(node.stream, OperatorNode) else {}


def specs_of_checks(node: OperatorNode | SinkNode, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """The checks of an asset as Dagster knows them."""
    about = {name: check.__doc__ for name, check in checks_of(node).items()}
    about[REPLAYED] = "No kept epoch came out otherwise when it was last replayed."
    return [dg.AssetCheckSpec(name, asset=key, description=description) for name, description in about.items()]


def results(node: OperatorNode | SinkNode, key: dg.AssetKey, epochs: Sequence[Epoch]) -> Iterator[dg.AssetCheckResult]:
    """Check an asset in these epochs."""
    for name, check in checks_of(node).items():
        found = [f"epoch {of.manifest.epoch}: {one}" for of in epochs for one in check(node, of)]
        yield _result(key, name, found, "")


def replay_result(key: dg.AssetKey, state: PipelineState) -> dg.AssetCheckResult:
    """Whether epochs came out the same when they were replayed."""
    found = [f"the latest replays of epochs {state.differing} were different"] if state.differing else []
    return _result(key, REPLAYED, found, f"replayed and identical: {state.verified}")


def _result(key: dg.AssetKey, name: str, problems: Sequence[str], otherwise: str) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=not problems,
        asset_key=key,
        check_name=name,
        description="; ".join(problems) or otherwise or None,
    )


def _files(node: OperatorNode, manifest: Manifest | None) -> Iterator[FileEntry]:
    for table in manifest.tables if manifest else ():
        if table.operator == node.name:
            yield from table.files


def _new_files(node: OperatorNode, manifest: Manifest) -> Iterator[FileEntry]:
    own = f"{names.epoch(manifest.epoch)}/"
    return (file for file in _files(node, manifest) if file.path.startswith(own))


def _watermark(node: OperatorNode, manifest: Manifest | None) -> int | None:
    records = manifest.operators if manifest else ()
    return next((record.watermark for record in records if record.operator == node.name), None)
