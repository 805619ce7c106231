"""A Delta table's log as a sink needs it: read the table, then commit on top of just that version or not at all."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from arroyo_dagster.errors import ConfigurationError, StorageError
from arroyo_dagster.sinks.delta_schema import new_columns

_COLOURS = re.compile(r"\x1b\[[0-9;]*m|↳")


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that is to be a part of the table."""

    path: str
    bytes: int
    stats: str


class TableVersion:
    """A table as it was when it was read."""

    def __init__(self, handle: Any) -> None:
        """Wrap deltalake's `DeltaTable`."""
        self.handle = handle

    def transaction(self, app_id: str) -> int:
        """The highest version that this application has committed; 0 when it has not."""
        return self.handle.transaction_version(app_id) or 0

    def paths(self) -> set[str]:
        """The data files that are in the table, below its directory."""
        return set(self.rows())

    def rows(self) -> dict[str, int | None]:
        """How many rows each of them has, as far as the log says that."""
        files = pa.table(self.handle.get_add_actions())
        # As they are in the log, where they are written as in a URL.
        paths = (unquote(path) for path in files.column("path").to_pylist())
        return dict(zip(paths, files.column("num_records").to_pylist(), strict=True))

    def lacks(self, schema: pa.Schema) -> list[Any]:
        """The columns of `schema` that the table does not have yet."""
        from deltalake import Schema  # noqa: PLC0415 - heavy

        return new_columns(self.handle.schema(), Schema.from_arrow(schema))


class DeltaLog:
    """Every call is one step of the protocol, and may raise `StorageError` with or without its effect.

    Those that commit return False if somebody else has been faster. Then read the table again: delta-rs would rather
    try by itself to commit on top of what it has not looked at, which is forbidden here.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        """Remember where; nothing is opened yet."""
        self._url = url
        self._options = delta_options(storage_options)

    def read(self) -> TableVersion | None:
        """Read the newest version; None when there is no table."""
        from deltalake import DeltaTable  # noqa: PLC0415 - heavy
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415 - heavy

        with self._explained("read"):
            try:
                return TableVersion(DeltaTable(self._url, storage_options=self._options))
            except TableNotFoundError:
                return None

    def create(self, schema: pa.Schema, transactions: Mapping[str, int]) -> bool:
        """Make an empty table."""
        from deltalake import DeltaTable  # noqa: PLC0415 - heavy
        from deltalake.exceptions import CommitFailedError, DeltaError  # noqa: PLC0415 - heavy

        with self._explained("create"):
            try:
                DeltaTable.create(
                    self._url,
                    schema,
                    storage_options=self._options,
                    commit_properties=_properties(transactions),
                )
            except CommitFailedError:
                return False
            except DeltaError as error:
                if "already exists" in str(error):
                    return False
                raise
        return True

    def add_columns(self, table: TableVersion, fields: Sequence[Any]) -> bool:
        """Let the table have more columns, which are null in the rows that it has."""
        from deltalake.exceptions import CommitFailedError  # noqa: PLC0415 - heavy

        with self._explained("add columns to"):
            try:
                table.handle.alter.add_columns(list(fields), commit_properties=_properties({}))
            except CommitFailedError:
                return False
        return True

    def commit(
        self, table: TableVersion, add: Sequence[NewFile], remove: Sequence[str], transactions: Mapping[str, int]
    ) -> bool:
        """Add and remove files in one transaction."""
        from deltalake.exceptions import CommitFailedError  # noqa: PLC0415 - heavy
        from deltalake.transaction import AddAction, RemoveAction  # noqa: PLC0415 - heavy

        now = time.time_ns() // 1_000_000
        actions: list[Any] = [AddAction(file.path, file.bytes, {}, now, True, file.stats) for file in add]
        actions += [RemoveAction(path, True, now, partition_values={}) for path in remove]
        with self._explained("commit to"):
            try:
                table.handle.create_write_transaction(
                    actions, mode="append", schema=table.handle.schema(), commit_properties=_properties(transactions)
                )
            except CommitFailedError:
                return False
        return True

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        from deltalake.exceptions import DeltaError, DeltaProtocolError  # noqa: PLC0415 - heavy

        try:
            yield
        except DeltaProtocolError as error:
            raise ConfigurationError(
                f"the Delta table {self._url} has features that cannot be written to: {_sentence(error)}"
            ) from error
        except (DeltaError, OSError) as error:
            raise StorageError(f"could not {verb} the Delta table {self._url}: {_sentence(error)}") from error


def delta_options(storage_options: Mapping[str, Any]) -> dict[str, str]:
    """Obstore's options as deltalake takes them: flat, and all of them text."""
    flat: dict[str, Any] = {}
    for name, value in storage_options.items():
        if name in {"client_options", "retry_config"}:
            flat |= value
        else:
            flat[name] = value
    if isinstance(backoff := flat.pop("backoff", None), Mapping):
        flat |= {f"backoff_config.{name}": value for name, value in backoff.items()}
    return {name: _option(name, value) for name, value in flat.items()}


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        return f"{value / timedelta(milliseconds=1):.0f}ms"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigurationError(f"the storage option {name!r} cannot be used for a Delta table: it has to be plain text")


def _properties(transactions: Mapping[str, int]) -> Any:
    from deltalake.transaction import CommitProperties, Transaction  # noqa: PLC0415 - heavy

    now = time.time_ns() // 1_000_000
    return CommitProperties(
        max_commit_retries=0,
        app_transactions=[Transaction(app_id, version, now) for app_id, version in transactions.items()],
    )


def _sentence(error: Exception) -> str:
    words = _COLOURS.sub("", str(error).split("Debug source", 1)[0]).split()
    return " ".join(words)[:300]
