"""A source of rows that are given, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster.dataflow import Offsets, ReadReport, Source, Split
from arroyo_dagster.model import JsonValue


class TableSource(Source):
    """The rows of a table, cut into epochs at `cuts` (row numbers that never fall), and read in `splits` parts each.

    After the last cut there is nothing new.
    """

    def __init__(self, table: pa.Table, cuts: Sequence[int], splits: int = 1) -> None:
        """Cut the table."""
        self._table = table
        self._cuts = tuple(cuts)
        self._splits = splits

    @property
    def schema(self) -> pa.Schema:
        """The table's schema."""
        return self._table.schema

    def latest(self, start: JsonValue, now: DateTime) -> Offsets:
        """The next cut. Offsets count cuts."""
        done = start if isinstance(start, int) else 0
        end = min(done + 1, len(self._cuts))
        return Offsets(end, backlog=end < len(self._cuts))

    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        """Parts of about the same size."""
        first, last = self._row(start), self._row(end)
        bounds = [first + (last - first) * part // self._splits for part in range(self._splits + 1)]
        return [Split([a, b], b - a) for a, b in pairwise(bounds) if a < b]

    def read(self, split: Split, columns: Sequence[str] | None, report: ReadReport) -> Iterator[pa.RecordBatch]:
        """The rows of a part."""
        assert isinstance(split.value, list)
        first, end = split.value
        assert isinstance(first, int)
        assert isinstance(end, int)
        rows = self._table.slice(first, end - first)
        yield from (rows if columns is None else rows.select(list(columns))).to_batches()

    def _row(self, offset: JsonValue) -> int:
        return self._cuts[offset - 1] if isinstance(offset, int) and offset > 0 else 0
