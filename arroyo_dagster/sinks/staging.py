"""What the sinks share: who a file belongs to, the record of what an epoch published, and where storage is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from arroyo_dagster.dataflow.sink import SinkIdentity, StagedWriter
from arroyo_dagster.errors import ConfigurationError, DamagedObjectError
from arroyo_dagster.log import Creation, Store
from arroyo_dagster.model import EpochSet, FileEntry, ObjectPath
from arroyo_dagster.state.files import RollingParquet, checksum
from arroyo_dagster.state.hashing import content_digest, digest_text, sum_digests

_RECORDS_IN_A_FOLDER = 1000
_RECORD = re.compile(r"_published/[0-9a-f]{16}/\d+/(\d{10,})\.json")


class SinkStore(Store, Protocol):
    """The storage of a sink: a `Store` that can move objects without reading them."""

    def top_names(self) -> list[ObjectPath]:
        """Name the objects that lie directly here."""

    def written_before(self, prefix: ObjectPath, moment: datetime) -> list[ObjectPath]:
        """Name every object below `prefix` that was last written before `moment`."""

    def size(self, path: ObjectPath) -> int | None:
        """Tell how many bytes an object has; None when there is none."""

    def read_range(self, path: ObjectPath, start: int, end: int) -> bytes | None:
        """Read the bytes from `start` up to `end`; None when there is no object."""

    def move(self, source: ObjectPath, target: ObjectPath) -> bool:
        """Give an object another name; False when there is no such object."""


class StagedFiles(RollingParquet, StagedWriter):
    """One task's rows of one epoch, as Parquet files."""


def located(url: str) -> str:
    """Say where a sink is, such that a task with another working directory finds the same place.

    Memory is refused: a sink is pickled to the tasks, and each would have a memory of its own.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        raise ConfigurationError("a sink cannot be in memory://, because its tasks run in other processes")
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return unquote(parts.path)
    return str(Path(url).absolute()) if len(parts.scheme) < 2 else url


def owner(identity: SinkIdentity) -> str:
    """Sixteen digits that tell this sink of this life of its pipeline from all others in the same place."""
    parts = json.dumps([identity.pipeline, identity.sink, identity.life])
    return blake2b(parts.encode(), digest_size=8).hexdigest()


def record_published(store: Store, tag: str, epoch: int, paths: Iterable[ObjectPath]) -> bool:
    """Write down, before the epoch is published, what it publishes. False: other files were written down earlier.

    These are files of another attempt, which has published the epoch before: so this is a replay of it.
    """
    path = _record(tag, epoch)
    content = json.dumps({"version": 1, "files": sorted(paths)}).encode()
    if store.create(path, content) is Creation.CREATED:
        return True
    [found] = store.read([path])
    return found is None or found == content


def recorded_epochs(store: Store, tag: str, epochs: EpochSet) -> dict[int, ObjectPath]:
    """Find the records of these epochs. It costs one listing for every thousand epochs."""
    folders = {
        folder
        for first, last in epochs.ranges
        for folder in range(first // _RECORDS_IN_A_FOLDER, last // _RECORDS_IN_A_FOLDER + 1)
    }
    found = {}
    for folder in sorted(folders):
        for path in store.names(ObjectPath(f"_published/{tag}/{folder:07d}")):
            if (match := _RECORD.fullmatch(path)) and int(match[1]) in epochs:
                found[int(match[1])] = path
    return found


def recorded_files(store: Store, record: ObjectPath, data: bytes | None) -> list[str]:
    """Tell which files a record names; none when it was deleted."""
    if data is None:
        return []
    try:
        return [str(path) for path in json.loads(data)["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedObjectError(f"{store.url}/{record} is damaged: restore it, or delete it") from error


def delete_staged(store: Store, files: Sequence[FileEntry]) -> None:
    """Delete staged files."""
    for file in files:
        store.delete(file.path)


def damaged(store: Store, files: Sequence[FileEntry], paths: Sequence[ObjectPath]) -> list[str]:
    """Name those of `paths` that are absent, or are not the bytes of the entry beside them.

    A replay writes the same rows as other bytes, so nothing is damaged if all of the rows together are right.
    """
    absent, altered, digests = [], [], []
    for file, path in zip(files, paths, strict=True):
        [data] = store.read([path])
        if data is None:
            absent.append(str(path))
        elif checksum(data) == file.checksum:
            digests.append(file.digest)
        else:
            altered.append(str(path))
            digests.append(_digest(data))
    if altered and not absent and sum_digests(digests) == sum_digests(file.digest for file in files):
        return []
    return absent + altered


def _digest(data: bytes) -> str:
    """The digest of a file's rows, or that of no rows if it is no Parquet file."""
    try:
        return digest_text(content_digest(pq.read_table(pa.BufferReader(data), use_threads=False)))
    except (pa.ArrowException, OSError):
        return digest_text(0)


def _record(tag: str, epoch: int) -> ObjectPath:
    return ObjectPath(f"_published/{tag}/{epoch // _RECORDS_IN_A_FOLDER:07d}/{epoch:010d}.json")
