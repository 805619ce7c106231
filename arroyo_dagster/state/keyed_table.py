"""A table of one row a key, of which the newest wins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from arroyo_dagster.dataflow.tables import GlobalTable, KeyedTable
from arroyo_dagster.model import FileEntry
from arroyo_dagster.state.hashing import canonical, key_hashes
from arroyo_dagster.state.tables import MAX_FILES, Scope, Table, last_of_each

DELETED = "_deleted"


class KeyedRowsTable(Table):
    """A `KeyedTable` or `GlobalTable` in use. Its files are upserts and, marked `_deleted`, tombstones."""

    _spec: KeyedTable | GlobalTable

    def __init__(
        self, spec: KeyedTable | GlobalTable, scope: Scope, files: Sequence[FileEntry], *, shared: bool = False
    ) -> None:
        """Begin with the files of the parent epoch; those of a `shared` table are another subtask's to merge."""
        super().__init__(spec, scope, files)
        self._shared = shared

    def get(self, keys: pa.RecordBatch | pa.Table) -> pa.Table:
        """Look keys up: one row for each, in their order, with nulls beside a key that is not there."""
        key_schema = pa.schema([self._spec.schema.field(name) for name in self._spec.key])
        wanted = self._canonical(self._conform(keys, key_schema))
        rows = pa.concat_tables([self._base.rows, self._changes.rows])
        old, new = self._base.find(wanted), self._changes.find(wanted)
        places = np.where(new >= 0, new + self._base.rows.num_rows, old)
        gone = rows[DELETED].combine_chunks().take(pa.array(places, mask=places < 0)).fill_null(True)
        found = pc.invert(gone)
        result = rows.take(pa.array(places, mask=~found.to_numpy(zero_copy_only=False)))
        columns = [wanted[name] if name in self._spec.key else result[name] for name in self._spec.schema.names]
        return pa.table([*columns, found], names=[*self._spec.schema.names, "found"])

    def upsert(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Insert rows, or replace those with the same key. Of several with one key, the last one counts."""
        self._change(self._conform(rows, self._spec.schema.remove_metadata()), deleted=False)

    def delete(self, keys: pa.RecordBatch | pa.Table) -> None:
        """Delete by key. It is no error if there is nothing."""
        named = self._conform(keys, pa.schema([self._spec.schema.field(name) for name in self._spec.key]))
        columns = [
            named[field.name] if field.name in self._spec.key else pa.nulls(named.num_rows, field.type)
            for field in self._spec.schema
        ]
        self._change(pa.table(columns, names=self._spec.schema.names), deleted=True)

    def scan(self) -> pa.Table:
        """Return all rows."""
        rows = last_of_each(pa.concat_tables([self._base.rows, self._changes.rows]), self._spec.key)
        return rows.filter(pc.invert(rows[DELETED])).drop_columns([DELETED])

    def discard(self) -> None:
        """Forget what no file has."""
        super().discard()
        self.__dict__.pop("_changes", None)

    def checkpoint(self, watermark: int | None) -> None:
        """Append the changed rows as one file, together with the newest of the others when there are too many."""
        changed = self._changes.rows
        too_many = len(self._files) + bool(changed.num_rows) > MAX_FILES
        count = self._files_to_merge() if too_many and not self._shared else 0
        kept, merged = self._files[: len(self._files) - count], self._files[len(self._files) - count :]
        rows = last_of_each(pa.concat_tables([*map(self._read, merged), changed]), self._spec.key)
        if not kept and not self._shared:
            rows = rows.filter(pc.invert(rows[DELETED]))  # there is nothing left to delete
        if count or changed.num_rows:
            self._files = [*kept, *([self._write(rows, None)] if rows.num_rows else [])]
        self._pending.clear()
        self.__dict__.pop("_changes", None)
        self.__dict__.pop("_base", None)

    def _files_to_merge(self) -> int:
        """How many of the newest files to merge: enough to stay within bounds, and older ones of about their size."""
        count, size = 0, 0
        for entry in reversed(self._files):
            if len(self._files) - count <= MAX_FILES // 2 and entry.bytes > 2 * size:
                break
            count, size = count + 1, size + entry.bytes
        return count

    def _change(self, rows: pa.Table, *, deleted: bool) -> None:
        if not rows.num_rows:
            return
        marks = pa.array(np.full(rows.num_rows, deleted))
        marked = self._canonical(rows).append_column(pa.field(DELETED, pa.bool_()), marks)
        self._pending.append(marked.cast(self._stored_schema))
        self.__dict__.pop("_changes", None)

    def _canonical(self, rows: pa.Table) -> pa.Table:
        for name in self._spec.key:
            if types.is_floating(rows.schema.field(name).type):
                rows = rows.set_column(rows.column_names.index(name), name, canonical(rows[name]))
        return rows

    @cached_property
    def _stored_schema(self) -> pa.Schema:
        # A tombstone has nothing but its key.
        fields = [
            field if field.name in self._spec.key else field.with_nullable(True)
            for field in self._spec.schema.remove_metadata()
        ]
        return pa.schema([*fields, pa.field(DELETED, pa.bool_())])

    @cached_property
    def _base(self) -> Keyed:
        """What the files say."""
        parts = [self._read(entry) for entry in self._files]
        rows = last_of_each(pa.concat_tables([*parts, self._stored_schema.empty_table()]), self._spec.key)
        return Keyed(rows.filter(pc.invert(rows[DELETED])), self._spec.key)

    @cached_property
    def _changes(self) -> Keyed:
        """What no file says yet."""
        rows = pa.concat_tables([*self._pending, self._stored_schema.empty_table()])
        self._pending = [last_of_each(rows, self._spec.key)] if rows.num_rows else []
        return Keyed(self._pending[0] if self._pending else rows, self._spec.key)


class Keyed:
    """Rows with distinct keys, and a way to find them by key."""

    def __init__(self, rows: pa.Table, key: Sequence[str]) -> None:
        """Index nothing before something is looked up."""
        self.rows = rows.combine_chunks()
        self._key = key

    def find(self, keys: pa.Table) -> npt.NDArray[np.int64]:
        """Tell at which place each key is; -1 when it is nowhere."""
        found = np.full(keys.num_rows, -1, np.int64)
        if not self.rows.num_rows or not keys.num_rows:
            return found
        order, hashes = self._index
        wanted = key_hashes([keys[name] for name in self._key])
        first, end = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
        # Keys that collide stand side by side; there is hardly ever more than one.
        for step in range(int((end - first).max())):
            asked = np.flatnonzero((first + step < end) & (found < 0))
            places = order[first[asked] + step]
            same = self._equal(keys.take(pa.array(asked)), self.rows.take(pa.array(places)))
            found[asked[same]] = places[same]
        return found

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        hashes = key_hashes([self.rows[name] for name in self._key])
        order = np.argsort(hashes, kind="stable")
        return order, hashes[order]

    def _equal(self, left: pa.Table, right: pa.Table) -> npt.NDArray[np.bool_]:
        same = np.ones(left.num_rows, np.bool_)
        for name in self._key:
            a, b = left[name], right[name]
            equal = pc.fill_null(pc.equal(a, b), False)
            alike = pc.or_(equal, pc.and_(pc.is_null(a), pc.is_null(b)))
            if types.is_floating(a.type):
                alike = pc.or_(alike, pc.fill_null(pc.and_(pc.is_nan(a), pc.is_nan(b)), False))
            same &= alike.to_numpy()
        return same
