"""Which files have been read: a file source's offset, and the choice of what to read next. No I/O."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from arroyo_dagster.errors import DamagedObjectError, NewerFormatError
from arroyo_dagster.model import JsonValue
from arroyo_dagster.sources.storage import InputFile

_VERSION = 1


@dataclass(frozen=True, slots=True)
class SeenFile:
    """What is remembered of a file: its size, and when it was modified, in seconds since 1970."""

    size: int
    modified: int


@dataclass(frozen=True, slots=True)
class SeenFiles:
    """All files that have been read, but for those that were modified before `forgotten_before`.

    `schema` is the rows' schema, where the first file has told it.
    """

    files: Mapping[str, SeenFile] = field(default_factory=dict)
    forgotten_before: int | None = None
    schema: pa.Schema | None = None

    @classmethod
    def from_json(cls, offset: JsonValue) -> SeenFiles:
        """Read an offset."""
        match offset:
            case None:
                return cls()
            case {"version": int(version)} if version > _VERSION:
                raise NewerFormatError(f"a file source's offset has version {version}: upgrade arroyo-dagster")
            case {"version": 1, "files": str(packed), "forgotten_before": None | int() as forgotten, "schema": schema}:
                names, sizes, modified = json.loads(zlib.decompress(b64decode(packed)))
                seen = map(SeenFile, sizes, modified)
                return cls(dict(zip(names, seen, strict=True)), forgotten, unpack_schema(schema))
            case _:
                raise DamagedObjectError(
                    "an offset is not one of a file source: give a source of another kind another name, "
                    "or rewind to epoch 0"
                )

    def to_json(self) -> JsonValue:
        """Write an offset. Names that resemble each other take a few bytes each, random ones about their length."""
        names = sorted(self.files)
        columns = [names, [self.files[name].size for name in names], [self.files[name].modified for name in names]]
        packed = zlib.compress(json.dumps(columns, separators=(",", ":")).encode())
        return {
            "version": _VERSION,
            "files": b64encode(packed).decode(),
            "forgotten_before": self.forgotten_before,
            "schema": pack_schema(self.schema),
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an epoch may read, and for how many seconds files are remembered."""

    max_files: int | None = None
    max_bytes: int | None = None
    forget_after: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The files of the next epoch, oldest first, what will have been seen then, and whether more remain."""

    files: tuple[InputFile, ...]
    seen: SeenFiles
    backlog: bool


def choose(seen: SeenFiles, found: Sequence[InputFile], limits: Limits, now: int) -> Choice:
    """Choose from the files that were found those that an epoch at `now`, in seconds since 1970, should read.

    What was seen in the epoch before decides what is forgotten, so that the files of this one are always named in
    `seen`, however old they are. Times to come count as now: a clock that is ahead does not make others forgotten.
    """
    times = {file.path: min(file.modified // 1_000_000, now) for file in found}
    horizon = _horizon(seen, limits)
    fresh = [
        file
        for file in sorted(found, key=lambda file: (file.modified, file.path))
        if file.path not in seen.files and (horizon is None or times[file.path] >= horizon)
    ]
    files = _within(fresh, limits)
    remembered = {
        # A file that is touched is not read again, and must be remembered for as long as it looks new.
        name: SeenFile(file.size, max(file.modified, times.get(name, 0)))
        for name, file in seen.files.items()
        if horizon is None or max(file.modified, times.get(name, 0)) >= horizon
    }
    chosen = {file.path: SeenFile(file.size, times[file.path]) for file in files}
    return Choice(files, SeenFiles(remembered | chosen, horizon, seen.schema), len(files) < len(fresh))


def _horizon(seen: SeenFiles, limits: Limits) -> int | None:
    """Files that were modified before this are not remembered. It never goes back, or they would be read again."""
    if limits.forget_after is None or not seen.files:
        return seen.forgotten_before
    horizon = max(file.modified for file in seen.files.values()) - limits.forget_after
    return horizon if seen.forgotten_before is None else max(horizon, seen.forgotten_before)


def _within(fresh: list[InputFile], limits: Limits) -> tuple[InputFile, ...]:
    """The first files, as far as the limits go, and at least one: one that is too large must not block the rest."""
    total = 0
    for at, file in enumerate(fresh):
        total += file.size
        if at and (at == limits.max_files or (limits.max_bytes is not None and total > limits.max_bytes)):
            return tuple(fresh[:at])
    return tuple(fresh)


def pack_schema(schema: pa.Schema | None) -> JsonValue:
    """A schema as JSON."""
    return None if schema is None else b64encode(schema.serialize().to_pybytes()).decode()


def unpack_schema(packed: JsonValue) -> pa.Schema | None:
    """What `pack_schema` packed."""
    return pa.ipc.read_schema(pa.py_buffer(b64decode(packed))) if isinstance(packed, str) else None
