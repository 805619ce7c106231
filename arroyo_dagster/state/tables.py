"""State tables in use: Arrow in memory, Parquet deltas on storage.

A table is a list of files, from the oldest to the newest. An entry of the list stands for the rows of a file that
belong to the entry's key groups: after a change of parallelism several subtasks share a file, each
with an entry of its own. A checkpoint adds one file at most, and merges small files into it when there are too many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.tables import TableSpec
from arroyo_dagster.errors import AttemptError, ConfigurationError
from arroyo_dagster.log import Store, names
from arroyo_dagster.model import FileEntry, ObjectPath
from arroyo_dagster.state.files import read_table, write_table
from arroyo_dagster.state.hashing import key_groups

MAX_FILES = 8

_GROUPS = b"arroyo_dagster.key_groups"


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose state a table is: one subtask of one operator in one attempt.

    `directory` is where it may write, under names that begin with `token`. `groups` are the key groups it owns,
    out of `group_count`, by the columns `keys`; an operator without a key has none.
    """

    store: Store
    directory: ObjectPath
    token: str
    keys: tuple[str, ...]
    groups: tuple[int, int] | None
    group_count: int


def restrict(files: Sequence[FileEntry], groups: tuple[int, int] | None) -> list[FileEntry]:
    """The entries, or parts of entries, that belong to these key groups, in their order."""
    if groups is None:
        return list(files)
    mine = []
    for file in files:
        assert file.key_groups is not None
        first, last = max(file.key_groups[0], groups[0]), min(file.key_groups[1], groups[1])
        if first <= last:
            mine.append(replace(file, key_groups=(first, last)))
    return mine


class Table(ABC):
    """What all kinds of tables share."""

    def __init__(self, spec: TableSpec, scope: Scope, files: Sequence[FileEntry]) -> None:
        """Begin with the files of the parent epoch; none is read before it is needed."""
        self._spec = spec
        self._scope = scope
        self._files = list(files)
        self._pending: list[pa.Table] = []
        self._written = 0

    @property
    def dirty(self) -> bool:
        """Whether there are rows that no file has yet."""
        return bool(self._pending)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files that hold the table, as far as it is persisted."""
        return tuple(self._files)

    def discard(self) -> None:
        """Forget what no file has."""
        self._pending.clear()

    @abstractmethod
    def checkpoint(self, watermark: int | None) -> None:
        """Persist what is new, and drop what the watermark has left behind."""

    @cached_property
    def _stored_schema(self) -> pa.Schema:
        return self._spec.schema.remove_metadata()

    def _conform(self, rows: pa.RecordBatch | pa.Table, schema: pa.Schema) -> pa.Table:
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        missing = [name for name in schema.names if name not in table.column_names]
        if missing:
            raise ConfigurationError(
                f"rows for table {self._spec.name!r} lack the column {missing[0]!r}: "
                f"they have {', '.join(table.column_names)}"
            )
        try:
            return table.select(schema.names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise ConfigurationError(f"rows for table {self._spec.name!r} do not fit its schema: {error}") from error

    def _read(self, entry: FileEntry) -> pa.Table:
        """Read the rows that an entry stands for."""
        table = read_table(self._scope.store, entry)
        written = (table.schema.metadata or {}).get(_GROUPS)
        table = table.select(self._stored_schema.names).cast(self._stored_schema)
        if entry.key_groups is None or written == _range(entry.key_groups):
            return table
        groups = key_groups([table[key] for key in self._scope.keys], self._scope.group_count)
        first, last = entry.key_groups
        return table.filter(pa.array((groups >= first) & (groups <= last)))

    def _write(self, rows: pa.Table, times: tuple[int, int] | None) -> FileEntry:
        groups = self._scope.groups
        self._check_owned(rows)
        metadata = {} if groups is None else {_GROUPS: _range(groups)}
        token = f"{self._scope.token}-{self._written}"
        self._written += 1
        path = names.table_file(self._scope.directory, self._spec.name, token)
        return write_table(self._scope.store, path, rows.replace_schema_metadata(metadata), groups, times)

    def _check_owned(self, rows: pa.Table) -> None:
        """See that all rows are of this subtask's keys: others would be lost when the parallelism changes."""
        if self._scope.groups is None:
            return
        groups = key_groups([rows[key] for key in self._scope.keys], self._scope.group_count)
        first, last = self._scope.groups
        foreign = np.flatnonzero((groups < first) | (groups > last))
        if len(foreign):
            key = {name: rows[name][int(foreign[0])].as_py() for name in self._scope.keys}
            raise AttemptError(
                f"table {self._spec.name!r} has a row with the key {key}, whose home is another subtask: "
                "write only rows with keys that this subtask was given"
            )


def last_of_each(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Keep, of the rows with one key, the last one."""
    if rows.num_rows < 2:
        return rows
    places = pa.table([*(rows[key] for key in keys), np.arange(rows.num_rows)], [*keys, "place of"])
    newest = places.group_by(list(keys), use_threads=False).aggregate([("place of", "max")])["place of_max"]
    if len(newest) == rows.num_rows:
        return rows
    return rows.take(newest.take(pc.sort_indices(newest)))


def _range(groups: tuple[int, int]) -> bytes:
    return f"{groups[0]}-{groups[1]}".encode()
