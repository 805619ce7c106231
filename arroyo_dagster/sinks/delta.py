"""Output as a Delta table."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.dataflow.sink import Sink, SinkIdentity, StagedWriter
from arroyo_dagster.errors import ConfigurationError, DamagedObjectError, ProtocolError, StorageError
from arroyo_dagster.log import open_store
from arroyo_dagster.model import EpochSet, FileEntry, ObjectPath
from arroyo_dagster.sinks.delta_log import DeltaLog, NewFile, TableVersion
from arroyo_dagster.sinks.delta_schema import delta_batch, statistics
from arroyo_dagster.sinks.staging import (
    SinkStore,
    StagedFiles,
    damaged,
    delete_staged,
    located,
    owner,
    record_published,
    recorded_epochs,
    recorded_files,
)

_OURS = re.compile(r"([0-9a-f]{16})/epoch-(\d{10,})/.+")
_TRIES = 20
_FOOTERS_AT_ONCE = 16
_FOOTER_BYTES = 64 << 10


class DeltaSink(Sink):
    """A Delta table in which an epoch appears with one transaction, or not at all.

    Tasks write data files to `<owner>/epoch-<number>/` in the table's directory, where nobody sees them until they
    are committed. Those of dead attempts, and of retracted epochs, go with the table's next full VACUUM.
    The application id `arroyo_dagster/<pipeline>/<sink>/<life>` has the newest published or retracted epoch as its
    version; each epoch has a small record in `_published/<owner>/`. Others may append to the table and optimize
    it. But an epoch that was rewritten by others can no longer be retracted, and a rewind then says so.

    Columns may be added from epoch to epoch. Timestamps are kept in microseconds; small unsigned integers become
    wider signed ones; what Delta has no type for is refused. `storage_options` are obstore's, for both libraries.
    """

    kind = "deltalake"

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Say where the table is, or will be. Nothing is opened or made yet."""
        self.url: str = located(url)
        self.storage_options = dict(storage_options or {})

    def open_store(self) -> SinkStore:
        """Open the storage below `url`; for tests to put faults in its way."""
        return open_store(self.url, self.storage_options)

    def open_log(self) -> DeltaLog:
        """Open the table's log; for tests to put faults in its way."""
        return DeltaLog(self.url, self.storage_options)

    def writer(self, identity: SinkIdentity, epoch: int, attempt: int, name: str) -> StagedWriter:
        """Write one task's rows to files of the table that it does not know yet."""
        folder = f"{owner(identity)}/epoch-{epoch:010d}"
        return _DeltaFiles(
            self.open_store(), lambda number: ObjectPath(f"{folder}/{attempt}-{name}-{number:04d}.parquet")
        )

    def publish(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> None:
        """Add the files in one transaction, and make the table if there is none.

        An epoch without files needs none: there is nothing that could appear twice.
        """
        if not files:
            return
        log, app_id = self.open_log(), _app_id(identity)
        staged: tuple[pa.Schema, list[NewFile]] | None = None
        for _ in self._tries():
            table = log.read()
            if table is not None and table.transaction(app_id) >= epoch:
                return
            if staged is None:
                staged = self._prepare(identity, epoch, files)
            schema, new = staged
            if table is None:
                log.create(schema, {})
            elif columns := table.lacks(schema):
                log.add_columns(table, columns)
            elif log.commit(table, new, [], {app_id: epoch}):
                return

    def retract(self, identity: SinkIdentity, epochs: EpochSet) -> None:
        """Remove the epochs' files in one transaction, which also keeps them from coming later."""
        if not epochs.ranges:
            return
        store, log, tag, app_id = self.open_store(), self.open_log(), owner(identity), _app_id(identity)
        marks = {f"{app_id}/retracted/{first}-{last}": last for first, last in epochs.ranges}
        for _ in self._tries():
            table = log.read()
            if table is None:
                schema = _any_schema(store, tag, epochs)
                if schema is None:
                    return  # nobody has written anything that could be published
                # Only a table can remember that these epochs must not come.
                log.create(schema, {})
                continue
            active = table.paths()
            removed = sorted(path for path in active if _epoch_of(path, tag) in epochs)
            done = all(table.transaction(mark) for mark in marks)
            if not done:
                self._refuse_what_was_rewritten(identity, store, table, active, epochs)
            version = max(table.transaction(app_id), epochs.ranges[-1][1])
            if (done and not removed) or log.commit(table, [], removed, {app_id: version, **marks}):
                break
        for record in recorded_epochs(store, tag, epochs).values():
            store.delete(record)

    def heal(
        self, identity: SinkIdentity, epoch: int, published: Sequence[FileEntry], files: Sequence[FileEntry]
    ) -> None:
        """Put the files in the place of the epoch's in one transaction, unless others have rewritten these."""
        store, log, tag = self.open_store(), self.open_log(), owner(identity)
        for _ in self._tries():
            table = log.read()
            active = _files_of(table, tag, epoch) if table else {}
            if table is None or sum(rows or 0 for rows in active.values()) != sum(file.rows for file in published):
                raise ProtocolError(
                    f"the sink {identity.sink} of {identity.pipeline} cannot publish epoch {epoch} again: its rows in "
                    f"the Delta table {self.url} were rewritten by others; restore the table, or rewind"
                )
            # The record is of the files that go. Without one, nothing is known of the epoch, which is no harm.
            for record in recorded_epochs(store, tag, EpochSet.of([epoch])).values():
                store.delete(record)
            _, new = self._prepare(identity, epoch, files)
            if log.commit(table, new, sorted(active), {}):
                return

    def discard(self, identity: SinkIdentity, files: Sequence[FileEntry]) -> None:
        """Delete staged files."""
        delete_staged(self.open_store(), files)

    def missing(self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]) -> Sequence[str]:
        """Name files that the table has and storage has lost, or all if the epoch is not in the table.

        Files that others have rewritten or deleted are theirs to answer for. Every file is read.
        """
        table = self.open_log().read()
        if table is None or table.transaction(_app_id(identity)) < epoch:
            return [str(file.path) for file in files]
        store, active = self.open_store(), _files_of(table, owner(identity), epoch)
        present = [file for file in files if file.path in active]
        healed = sorted(active.keys() - {file.path for file in files})
        absent = [path for path in healed if store.size(ObjectPath(path)) is None]
        return damaged(store, present, [file.path for file in present]) + absent

    def _prepare(
        self, identity: SinkIdentity, epoch: int, files: Sequence[FileEntry]
    ) -> tuple[pa.Schema, list[NewFile]]:
        store = self.open_store()
        with ThreadPoolExecutor(min(len(files), _FOOTERS_AT_ONCE)) as pool:
            footers = list(pool.map(lambda file: _footer(store, file.path, file.bytes), files))
        for file, footer in zip(files, footers, strict=True):
            if footer is None:
                raise DamagedObjectError(
                    f"the sink {identity.sink} of {identity.pipeline} cannot publish epoch {epoch}: "
                    f"{store.url}/{file.path} is lost or damaged; replay the epoch"
                )
        schemas = [footer.schema.to_arrow_schema().remove_metadata() for footer in footers if footer]
        new = [
            NewFile(file.path, file.bytes, statistics(footer))
            for file, footer in zip(files, footers, strict=True)
            if footer
        ]
        record_published(store, owner(identity), epoch, [file.path for file in files])
        try:
            return pa.unify_schemas(schemas), new
        except pa.ArrowException as error:
            raise ConfigurationError(
                f"the sink {identity.sink} of {identity.pipeline} got rows of different types in epoch {epoch}: {error}"
            ) from error

    def _refuse_what_was_rewritten(
        self, identity: SinkIdentity, store: SinkStore, table: TableVersion, active: set[str], epochs: EpochSet
    ) -> None:
        """Rows that others have put into files of their own cannot be told from theirs."""
        if all(_OURS.fullmatch(path) for path in active):
            return
        published = epochs - epochs.after(table.transaction(_app_id(identity)))
        records = recorded_epochs(store, owner(identity), published)
        contents = store.read(list(records.values()))
        for (epoch, record), content in zip(records.items(), contents, strict=True):
            if set(recorded_files(store, record, content)) - active:
                raise ProtocolError(
                    f"the sink {identity.sink} of {identity.pipeline} cannot retract epoch {epoch}: its rows in the "
                    f"Delta table {self.url} were rewritten by others (OPTIMIZE, for example); restore the table to "
                    f"a version before that, or delete the rows yourself and then {store.url}/{record}"
                )

    def _tries(self) -> Iterator[None]:
        for number in range(_TRIES):
            if number > 3:  # the first ones make the table and its columns
                time.sleep(random.uniform(0, min(0.01 * 2**number, 1)))  # noqa: S311 - only to keep writers apart
            yield
        raise StorageError(f"other writers have been faster {_TRIES} times at the Delta table {self.url}: try again")


class _DeltaFiles(StagedFiles):
    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows, in the types that Delta has."""
        super().write(delta_batch(batch))


def _app_id(identity: SinkIdentity) -> str:
    return f"arroyo_dagster/{identity.pipeline}/{identity.sink}/{identity.life}"


def _epoch_of(path: str, tag: str) -> int:
    match = _OURS.fullmatch(path)
    return int(match[2]) if match and match[1] == tag else 0


def _files_of(table: TableVersion, tag: str, epoch: int) -> dict[str, int | None]:
    """The files of one epoch that are in the table, and their rows."""
    return {path: rows for path, rows in table.rows().items() if _epoch_of(path, tag) == epoch}


def _any_schema(store: SinkStore, tag: str, epochs: EpochSet) -> pa.Schema | None:
    for path in store.names(ObjectPath(tag)):
        size = store.size(path) if _epoch_of(path, tag) in epochs else None
        footer = _footer(store, path, size) if size else None
        if footer:
            return footer.schema.to_arrow_schema().remove_metadata()
    return None


def _footer(store: SinkStore, path: ObjectPath, size: int) -> pq.FileMetaData | None:
    """Read what a Parquet file says of itself, which is at its end; None when it is lost or damaged."""
    try:
        tail = store.read_range(path, max(0, size - _FOOTER_BYTES), size)
        if tail is None:
            return None
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > len(tail):
            tail = store.read_range(path, max(0, size - length), size)
        return pq.read_metadata(pa.BufferReader(tail))
    except pa.ArrowException:
        return None
