"""A source of files: whatever appears in a directory or a bucket is read, each file once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import pyarrow as pa
from pendulum import DateTime

from arroyo_dagster.dataflow.duration import DurationLike, microseconds
from arroyo_dagster.dataflow.source import Offsets, ReadReport, Source, Split
from arroyo_dagster.errors import ConfigurationError, DamagedObjectError
from arroyo_dagster.model import JsonValue, to_micros
from arroyo_dagster.sources.formats import (
    FORMATS,
    PATTERNS,
    Format,
    UnreadableFileError,
    parquet_schema,
    read_batches,
    unreadable_types,
)
from arroyo_dagster.sources.seen import Limits, SeenFiles, choose, pack_schema, unpack_schema
from arroyo_dagster.sources.storage import InputFile, InputStorage, local_directory


class FileSource(Source):
    """New files below a directory or a bucket's URL, at any depth, each read once in the life of a pipeline.

    A file must appear whole, and must not change: write it under a name that begins with "_" or "." (a name or a
    folder that does is never looked at) and rename it when it is done. One that has changed its size by the time it
    is read, or is gone, is an error; one that changes after it was read is not read again, but cannot be replayed.

    `pattern` is one or several globs for the file's name, without its folders; the default goes by the format. JSON
    is one object a line, with dates and timestamps as text. CSV has a header; a value that is empty and not in
    quotes is null. Both may be compressed (.gz, .bz2, .zst).

    `schema` is needed for JSON and CSV. Without it, Parquet takes that of the first file, for good. Files are fitted
    to it by name: a missing column is null, others are dropped, types are cast if no value suffers.

    A file that cannot be read, or does not fit, fails the epoch, unless `on_bad_file` is "quarantine": then all of it
    is left out, and the epoch's record names it. Of a Parquet file, only the columns in use are looked at.

    `max_files_per_epoch` and `max_bytes_per_epoch` bound an epoch, which takes the oldest files first, and always
    at least one.

    No file is missed, however late or oddly named it appears, because the offset holds the names of all that were
    read, and every epoch lists the whole directory. The log gets the offset with every epoch: about a dozen bytes
    a file where names resemble each other, forty where they are random; a hundred thousand files add a second to the
    planning of an epoch. With `forget_after`, files that are older than that before the newest that was read are
    neither remembered nor read, which bounds the offset; a file that appears later than that is lost, so give it
    more than the longest delay there can be.

    A task holds one file in memory at a time. `storage_options` are obstore's, as for the state's storage.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        format: Format = "parquet",  # noqa: A002
        *,
        schema: pa.Schema | None = None,
        pattern: str | Sequence[str] | None = None,
        max_files_per_epoch: int | None = None,
        max_bytes_per_epoch: int | None = None,
        on_bad_file: Literal["fail", "quarantine"] = "fail",
        storage_options: Mapping[str, Any] | None = None,
        forget_after: DurationLike | None = None,
    ) -> None:
        """Describe the files; nothing is looked at yet."""
        url = os.fspath(url)
        if not url:
            raise ConfigurationError("a file source needs the url of a directory or a bucket, not an empty one")
        directory = local_directory(url)
        # A task may have another working directory.
        self.url: str = url.rstrip("/") if directory is None else str(directory)
        self.kind = self._format = _checked_format(url, format, schema)
        self._schema = schema
        self._patterns = _checked_patterns(url, PATTERNS[format] if pattern is None else pattern)
        if on_bad_file not in ("fail", "quarantine"):
            raise ConfigurationError(f"source {url}: on_bad_file is 'fail' or 'quarantine', not {on_bad_file!r}")
        self._quarantine = on_bad_file == "quarantine"
        self._options = dict(storage_options or {})
        self._limits = Limits(
            _checked_limit(url, "max_files_per_epoch", max_files_per_epoch),
            _checked_limit(url, "max_bytes_per_epoch", max_bytes_per_epoch),
            None if forget_after is None else _checked_forget_after(url, forget_after),
        )
        self._opened: InputStorage | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the configuration, not the connection."""
        return {**self.__dict__, "_opened": None}

    @property
    def schema(self) -> pa.Schema | None:
        """The schema as it was given."""
        return self._schema

    def schema_at(self, end: JsonValue) -> pa.Schema | None:
        """The schema as it was given, or as the first file that could be read has told it."""
        return SeenFiles.from_json(end).schema if self._schema is None else self._schema

    def latest(self, start: JsonValue, now: DateTime) -> Offsets:
        """List the files and choose from those that were not seen. The offset is what has been seen."""
        found = [file for file in self._storage.files() if self._matches(file.path)]
        choice = choose(SeenFiles.from_json(start), found, self._limits, to_micros(now) // 1_000_000)
        if not choice.files:
            return Offsets(start)
        seen = choice.seen
        if self._schema is None and seen.schema is None:
            seen = SeenFiles(seen.files, seen.forgotten_before, self._first_schema(choice.files))
        return Offsets(seen.to_json(), choice.backlog)

    def splits(self, start: JsonValue, end: JsonValue) -> Sequence[Split]:
        """Make each file that is seen at `end` and not at `start` a split, by name."""
        before, after = SeenFiles.from_json(start), SeenFiles.from_json(end)
        schema = pack_schema(after.schema) if self._schema is None else None
        return [
            Split({"path": path, "size": after.files[path].size, "schema": schema}, max(after.files[path].size, 1))
            for path in sorted(after.files.keys() - before.files.keys())
        ]

    def read(self, split: Split, columns: Sequence[str] | None, report: ReadReport) -> Iterator[pa.RecordBatch]:
        """Read one file, in its order."""
        match split.value:
            case {"path": str(path), "size": int(size), "schema": packed}:
                schema = unpack_schema(packed) if self._schema is None else self._schema
            case other:
                raise ConfigurationError(f"{other!r} is not a split of a file source")
        data = self._read(path, size)
        try:
            batches = self._batches(path, data, schema, columns)
            # Half a file must not get into an epoch that leaves the file out.
            yield from list(batches) if self._quarantine else batches
        except UnreadableFileError as error:
            if not self._quarantine:
                remedy = "put an intact copy in its place and rewind to the epoch before"
                raise self._damaged(path, error, remedy) from error
            report.quarantined.append(f"{self.url}/{path}")

    @property
    def _storage(self) -> InputStorage:
        if self._opened is None:
            self._opened = InputStorage(self.url, self._options)
        return self._opened

    def _matches(self, path: str) -> bool:
        name = path.rsplit("/", 1)[-1]
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _first_schema(self, files: Sequence[InputFile]) -> pa.Schema | None:
        for file in files:
            try:
                return parquet_schema(self._read(file.path, file.size))
            except UnreadableFileError as error:
                if not self._quarantine:
                    raise self._damaged(file.path, error, "put an intact copy in its place") from error
        return None

    def _read(self, path: str, size: int) -> pa.Buffer:
        data = self._storage.read(path)
        remedy = "put it back as it was, or rewind to the epoch before, which lists the files anew"
        if data is None:
            raise DamagedObjectError(f"{self.url}/{path} has vanished since its epoch was planned: {remedy}")
        if len(data) != size:
            raise DamagedObjectError(
                f"{self.url}/{path} has changed from {size} to {len(data)} bytes since its epoch was planned: {remedy}"
            )
        return pa.py_buffer(data)

    def _batches(
        self, path: str, data: pa.Buffer, schema: pa.Schema | None, columns: Sequence[str] | None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            raise UnreadableFileError("no file of its epoch could be read when the epoch was planned")
        names = schema.names if columns is None else list(columns)
        if unknown := sorted(set(names) - set(schema.names)):
            raise ConfigurationError(
                f"source {self.url} has no column {unknown[0]!r}: there are {', '.join(schema.names)}"
            )
        return read_batches(self._format, path, data, schema, names)

    def _damaged(self, path: str, error: UnreadableFileError, remedy: str) -> DamagedObjectError:
        return DamagedObjectError(
            f"{self.url}/{path} cannot be read as {self._format}: {error}; {remedy}, "
            'or leave it out with on_bad_file="quarantine"'
        )


def _checked_format(url: str, format: Format, schema: pa.Schema | None) -> Format:  # noqa: A002
    if format not in FORMATS:
        raise ConfigurationError(f"source {url}: its format is one of {', '.join(FORMATS)}, not {format!r}")
    if schema is None:
        if format != "parquet":
            raise ConfigurationError(f"source {url}: {format} files do not tell their types, so give it a schema")
        return format
    if not isinstance(schema, pa.Schema):
        raise ConfigurationError(f"source {url}: its schema must be a pyarrow.Schema, not {schema!r}")
    if not schema.names:
        raise ConfigurationError(f"source {url}: its schema has no columns; give it those that are wanted")
    if len(set(schema.names)) < len(schema):
        raise ConfigurationError(f"source {url}: its schema has two columns of one name; rename one of them")
    if unreadable := unreadable_types(format, schema):
        raise ConfigurationError(
            f"source {url}: {format} has no values of type {schema.field(unreadable[0]).type}, "
            f"which its schema gives to {unreadable[0]!r}: take another type"
        )
    return format


def _checked_patterns(url: str, pattern: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not patterns or any(not pattern or "/" in pattern for pattern in patterns):
        raise ConfigurationError(
            f"source {url}: its pattern is a glob for names without folders, such as '*.parquet', not {pattern!r}"
        )
    return patterns


def _checked_limit(url: str, name: str, limit: int | None) -> int | None:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ConfigurationError(f"source {url}: {name} must be a whole number from 1 on, not {limit!r}")
    return limit


def _checked_forget_after(url: str, duration: DurationLike) -> int:
    seconds = microseconds(duration, f"source {url}: its forget_after") // 1_000_000
    if seconds < 1:
        raise ConfigurationError(f"source {url}: its forget_after must be a second or more, not {duration!r}")
    return seconds
