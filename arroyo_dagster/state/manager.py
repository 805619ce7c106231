"""All state tables of one subtask, from restore to checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from arroyo_dagster.dataflow.operator import TableManager
from arroyo_dagster.dataflow.tables import GlobalTable, KeyedTable, TableSpec, TimeTable
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.model import FileEntry, TableFiles
from arroyo_dagster.state.keyed_table import KeyedRowsTable
from arroyo_dagster.state.tables import Scope, Table, restrict
from arroyo_dagster.state.time_table import TimeRowsTable


@dataclass(frozen=True, slots=True)
class TableReport:
    """The files of one table as one subtask leaves them.

    A table that all subtasks share is looked after by the first one: the others tell only what they have added.
    """

    table: str
    files: tuple[FileEntry, ...]


class SubtaskTables(TableManager):
    """The tables of one subtask."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        scope: Scope,
        subtask: int,
        parent: Mapping[str, Sequence[FileEntry]],
        watermark: int | None,
    ) -> None:
        """Restore the tables from the parent epoch's files, as it left them at `watermark`."""
        self._specs = {spec.name: spec for spec in specs}
        self._subtask = subtask
        self._parent = parent
        self.watermark = watermark
        self.persisted = False
        self._tables = {spec.name: self._open(spec, scope) for spec in specs}

    def table(self, spec: TableSpec | str) -> Table:
        """The table of that name."""
        name = spec if isinstance(spec, str) else spec.name
        if name not in self._tables:
            declared = ", ".join(self._tables) or "none"
            raise ConfigurationError(f"there is no table {name!r}; tables() declares {declared}")
        return self._tables[name]

    def checkpoint(self) -> None:
        """Persist what has changed since the last epoch."""
        for table in self._tables.values():
            table.checkpoint(self.watermark)
        self.persisted = True

    def tidy(self) -> None:
        """Merge the files of shared tables if they are too many, whether this subtask has changed anything or not."""
        for name, table in self._tables.items():
            if self._subtask == 0 and isinstance(self._specs[name], GlobalTable) and not table.dirty:
                table.checkpoint(self.watermark)

    def dropped(self) -> dict[str, int]:
        """How many rows came to tables that the watermark had left behind already, by table."""
        counts = {name: table.dropped for name, table in self._tables.items() if isinstance(table, TimeRowsTable)}
        return {f"late rows of table {name}": count for name, count in counts.items() if count}

    def discard(self) -> None:
        """Forget what has changed since the last epoch."""
        for table in self._tables.values():
            table.discard()

    @property
    def dirty(self) -> str | None:
        """The name of a table with rows that no file has; None when all is persisted."""
        return next((name for name, table in self._tables.items() if table.dirty), None)

    def reports(self) -> tuple[TableReport, ...]:
        """The files of every table, as this subtask leaves them."""
        return tuple(TableReport(name, self._files_of(name, table)) for name, table in self._tables.items())

    def _open(self, spec: TableSpec, scope: Scope) -> Table:
        files = self._parent.get(spec.name, ())
        match spec:
            case TimeTable():
                return TimeRowsTable(spec, scope, restrict(files, scope.groups), self.watermark)
            case KeyedTable():
                return KeyedRowsTable(spec, scope, restrict(files, scope.groups))
            case GlobalTable():
                return KeyedRowsTable(spec, replace(scope, keys=(), groups=None), files, shared=self._subtask > 0)

    def _files_of(self, name: str, table: Table) -> tuple[FileEntry, ...]:
        if not isinstance(self._specs[name], GlobalTable) or self._subtask == 0:
            return table.files
        inherited = {file.path for file in self._parent.get(name, ())}
        return tuple(file for file in table.files if file.path not in inherited)


def gather(operator: str, reports: Sequence[Sequence[TableReport]]) -> tuple[TableFiles, ...]:
    """Put together what the subtasks of an operator report, in the order of their indices."""
    tables: dict[str, list[FileEntry]] = {}
    for subtask in reports:
        for report in subtask:
            tables.setdefault(report.table, []).extend(report.files)
    return tuple(TableFiles(operator, table, tuple(files)) for table, files in tables.items())
