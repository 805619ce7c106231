"""A table of rows with a time, which leave when the watermark has passed them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from arroyo_dagster.dataflow.duration import microseconds
from arroyo_dagster.dataflow.tables import TimeTable
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.model import FileEntry
from arroyo_dagster.state.tables import MAX_FILES, Scope, Table
from arroyo_dagster.state.times import to_micros


class TimeRowsTable(Table):
    """A `TimeTable` in use. Its files are unordered: rows are only added, and leave by their time."""

    _spec: TimeTable

    def __init__(self, spec: TimeTable, scope: Scope, files: Sequence[FileEntry], watermark: int | None) -> None:
        """Begin with the files of the parent epoch, and with the watermark that it left."""
        super().__init__(spec, scope, files)
        self._retention = microseconds(spec.retention)
        self._watermark = watermark
        self.dropped = 0

    def append(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows. Those that the watermark has left behind already are counted, and not kept."""
        table = self._conform(rows, self._stored_schema)
        if table[self._spec.time].null_count:
            raise ConfigurationError(f"table {self._spec.name!r}: a row has no time in {self._spec.time!r}")
        kept = self._after(table, self._watermark)
        self.dropped += table.num_rows - kept.num_rows
        if kept.num_rows:
            self._pending.append(kept)

    def scan(self, start: int | None = None, end: int | None = None) -> pa.Table:
        """Return the rows with `start <= time < end`. Only the files that can have some are read."""
        parts = []
        for entry in self._files:
            assert entry.times is not None
            if (start is None or entry.times[1] >= start) and (end is None or entry.times[0] < end):
                parts.append(self._after(self._read(entry), self._watermark))
        rows = pa.concat_tables([*parts, *self._pending, self._stored_schema.empty_table()])
        if start is None and end is None:
            return rows
        times = self._times(rows)
        keep = pa.scalar(True) if start is None else pc.greater_equal(times, start)
        return rows.filter(keep if end is None else pc.and_(keep, pc.less(times, end)))

    def checkpoint(self, watermark: int | None) -> None:
        """Append the new rows as one file; files wholly behind the watermark leave unread."""
        self._files = [entry for entry in self._files if not self._expired(entry, watermark)]
        new = self._combined([self._after(rows, watermark) for rows in self._pending])
        merged: list[FileEntry] = []
        if len(self._files) + bool(new.num_rows) > MAX_FILES:
            smallest = sorted(self._files, key=lambda entry: entry.bytes)
            merged = smallest[: len(self._files) - MAX_FILES // 2]
            old = [self._after(self._read(entry), watermark) for entry in merged]
            new = self._combined([*old, new])
        self._files = [entry for entry in self._files if entry not in merged]
        if new.num_rows:
            bounds = pc.min_max(self._times(new))
            self._files.append(self._write(new, (bounds["min"].as_py(), bounds["max"].as_py())))
        self._pending.clear()
        self._watermark = watermark

    def _combined(self, parts: Sequence[pa.Table]) -> pa.Table:
        rows = pa.concat_tables([*parts, self._stored_schema.empty_table()])
        if self._spec.combine is None or sum(part.num_rows > 0 for part in parts) < 2:
            return rows
        return self._conform(self._spec.combine(rows), self._stored_schema)

    def _times(self, rows: pa.Table) -> pa.ChunkedArray:
        return to_micros(rows[self._spec.time])

    def _after(self, rows: pa.Table, watermark: int | None) -> pa.Table:
        if watermark is None or not rows.num_rows:
            return rows
        horizon = watermark - self._retention
        times = self._times(rows)
        return rows if pc.min(times).as_py() > horizon else rows.filter(pc.greater(times, horizon))

    def _expired(self, entry: FileEntry, watermark: int | None) -> bool:
        assert entry.times is not None
        return watermark is not None and entry.times[1] + self._retention <= watermark
