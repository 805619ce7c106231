"""Output as plain Parquet files in a directory or bucket."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import pendulum

from arroyo_dagster.dataflow.sink import Sink, SinkIdentity, StagedWriter
from arroyo_dagster.errors import DamagedObjectError
from arroyo_dagster.log import Store, open_store
from arroyo_dagster.model import EpochSet, FileEntry, ObjectPath
from arroyo_dagster.sinks.staging import (
    SinkStore,
    StagedFiles,
    damaged,
    delete_staged,
    located,
    owner,
    record_published,
)

_PUBLISHED = re.compile(r"epoch-(\d{10,})-([0-9a-f]{16})-\d{4,}\.parquet")
_STAGED = re.compile(r"_staging/[0-9a-f]{16}/(\d{10,})/.+")
_TOMBSTONE = re.compile(r"_retracted/[0-9a-f]{16}/(\d{10,})-(\d{10,})(\.swept)?")
_DEAD_FOR_SURE = pendulum.duration(days=1)


class ParquetSink(Sink):
    """Plain Parquet files that DuckDB (`read_parquet('url/*.parquet')`) and Spark (`spark.read.parquet(url)`) read.

    The files of an epoch are `epoch-<number>-<owner>-<index>.parquet`. Readers see each of them whole or not at all,
    but they appear one after the other; take `DeltaSink` where an epoch has to appear at once. Everything else
    in the directory begins with an underscore, which readers pass over:

    _staging/<owner>/<epoch>/        what tasks have written and nobody has published yet
    _published/<owner>/              one small record an epoch: which staged files it was made of
    _retracted/<owner>/<from>-<to>   epochs that must not appear again; never delete these

    A directory may have several owners: sinks, pipelines, or lives of one pipeline. `storage_options` are obstore's.
    """

    kind = "parquet"

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Say where the files go. Nothing is opened or made yet."""
        self.url: str = located(url)
        self.storage_options = dict(storage_options or {})

    def open_store(self) -> SinkStore:
        """Open the storage below `url`; for tests to put faults in its way."""
        return open_store(self.url, self.storage_options)

    def writer(self, identity: SinkIdentity, epoch: int, attempt: int, name: str) -> StagedWriter:
        """Stage one task's rows."""
        folder = f"{_staging(owner(identity))}/{epoch:010d}"
        return StagedFiles(
            self.open_store(), lambda number: ObjectPath(f"{folder}/{attempt}-{name}-{number:04d}.parquet")
        )

    def publish(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> None:
        """Move the staged files to where readers look, and clear away what dead attempts have staged.

        Files of another attempt replace those that were published before, which heals lost ones.
        """
        store, tag = self.open_store(), owner(identity)
        if epoch not in _epochs(_tombstones(store, tag)):
            self._show(store, tag, identity, epoch, files)
            _sweep(store, tag, epoch)
        _clear_staging(store, tag, epoch)

    def retract(self, identity: SinkIdentity, epochs: EpochSet) -> None:
        """Bury the epochs, and delete their files.

        Staged files go before published ones: what a late publisher has moved until then is found here, and
        afterwards there is nothing left for it to move.
        """
        store, tag = self.open_store(), owner(identity)
        for first, last in epochs.ranges:
            store.create(_tombstone(tag, first, last), b"")
        for path in store.names(_staging(tag)):
            if (match := _STAGED.fullmatch(path)) and int(match[1]) in epochs:
                store.delete(path)
        _delete_published(store, tag, epochs)

    def discard(self, identity: SinkIdentity, files: Sequence[FileEntry]) -> None:
        """Delete staged files."""
        delete_staged(self.open_store(), files)

    def missing(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> Sequence[str]:
        """Name published files that are absent or damaged. Every file is read."""
        return damaged(self.open_store(), files, _targets(owner(identity), epoch, files))

    def _show(self, store: SinkStore, tag: str, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> None:
        if not files:
            return
        targets = _targets(tag, epoch, files)
        replayed = not record_published(store, tag, epoch, [file.path for file in files])
        lost = [
            file.path
            for file, target in zip(files, targets, strict=True)
            if not store.move(file.path, target) and store.size(target) is None
        ]
        # Somebody may have retracted the epoch while it was published.
        if epoch in _epochs(_tombstones(store, tag)):
            for target in targets:
                store.delete(target)
        elif lost:
            raise DamagedObjectError(
                f"the sink {identity.sink} of {identity.pipeline} cannot publish epoch {epoch}: {store.url}/{lost[0]} "
                f"is lost ({len(lost)} of {len(files)} files are neither staged nor published); replay the epoch"
            )
        elif replayed:
            _delete_published(store, tag, EpochSet.of([epoch]), but=targets)


def _targets(tag: str, epoch: int, files: Sequence[FileEntry]) -> list[ObjectPath]:
    return [ObjectPath(f"epoch-{epoch:010d}-{tag}-{index:04d}.parquet") for index in range(len(files))]


def _staging(tag: str) -> ObjectPath:
    return ObjectPath(f"_staging/{tag}")


def _tombstone(tag: str, first: int, last: int, suffix: str = "") -> ObjectPath:
    return ObjectPath(f"_retracted/{tag}/{first:010d}-{last:010d}{suffix}")


def _tombstones(store: Store, tag: str) -> dict[tuple[int, int], bool]:
    """The ranges of epochs that were retracted, and whether somebody has looked after each since."""
    found: dict[tuple[int, int], bool] = {}
    for path in store.names(ObjectPath(f"_retracted/{tag}")):
        if match := _TOMBSTONE.fullmatch(path):
            span = int(match[1]), int(match[2])
            found[span] = found.get(span, False) or bool(match[3])
    return found


def _epochs(spans: Iterable[tuple[int, int]]) -> EpochSet:
    return reduce(or_, (EpochSet((span,)) for span in spans), EpochSet())


def _clear_staging(store: SinkStore, tag: str, epoch: int) -> None:
    """Delete what is still staged of this epoch, and of earlier ones if no replay can be at work on it."""
    for path in store.names(ObjectPath(f"{_staging(tag)}/{epoch:010d}")):
        store.delete(path)
    for path in store.written_before(_staging(tag), pendulum.now("UTC") - _DEAD_FOR_SURE):
        if (match := _STAGED.fullmatch(path)) and int(match[1]) < epoch:
            store.delete(path)


def _sweep(store: SinkStore, tag: str, epoch: int) -> None:
    """Delete what a publisher has shown of a retracted epoch if it died before it could see the tombstone.

    Storage may have been copying for it when the epoch was retracted. Once is enough: by the time that a later epoch
    is published, such a copy is done, and no other can begin because nothing is staged any more.
    """
    spans = [span for span, swept in _tombstones(store, tag).items() if not swept and span[1] < epoch]
    if spans:
        _delete_published(store, tag, _epochs(spans))
    for first, last in spans:
        store.create(_tombstone(tag, first, last, ".swept"), b"")


def _delete_published(store: SinkStore, tag: str, epochs: EpochSet, but: Sequence[ObjectPath] = ()) -> None:
    for path in store.top_names():
        match = _PUBLISHED.fullmatch(path)
        if match and match[2] == tag and int(match[1]) in epochs and path not in but:
            store.delete(path)
