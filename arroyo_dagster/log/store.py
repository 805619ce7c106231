"""The storage that a log needs, on a local disk, in memory, or on any object store that obstore speaks to.

Objects are created and deleted, never overwritten. `create` is atomic: of any number of writers of one name,
exactly one is told `CREATED`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from arroyo_dagster.errors import ConfigurationError, StorageError
from arroyo_dagster.model import ObjectPath

_REMOTE_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"})
_READS_AT_ONCE = 16


class Creation(Enum):
    """What became of a `create`."""

    CREATED = auto()
    TAKEN = auto()


class Store(Protocol):
    """What a pipeline asks of its storage. Every call may raise `StorageError`, with or without its effect."""

    @property
    def url(self) -> str:
        """Where this is, for people."""

    def create(self, path: ObjectPath, data: bytes) -> Creation:
        """Write a new object, whole or not at all; `TAKEN` when the name exists already."""

    def read(self, paths: Sequence[ObjectPath]) -> list[bytes | None]:
        """Read objects; None stands for one that does not exist."""

    def names(self, prefix: ObjectPath) -> list[ObjectPath]:
        """Name every object below `prefix`, in order."""

    def delete(self, path: ObjectPath) -> None:
        """Delete an object; it is no error if there is none."""


class ObjectStorage:
    """A `Store` on obstore. Make one with `open_store`; `below` narrows it to a prefix."""

    def __init__(self, url: str, objects: ObjectStore, directory: Path | None = None, prefix: str = "") -> None:
        """Keep everything below `prefix` in `objects`, which is `directory` when it is a local disk."""
        self._url = url
        self._objects = objects
        self._directory = directory
        self._prefix = prefix

    @property
    def url(self) -> str:
        """Where this is, for people."""
        return f"{self._url.rstrip('/')}/{self._prefix}".rstrip("/")

    def below(self, prefix: str) -> ObjectStorage:
        """Narrow the store to what lies below `prefix`."""
        return ObjectStorage(self._url, self._objects, self._directory, f"{self._prefix}{ObjectPath(prefix)}/")

    def create(self, path: ObjectPath, data: bytes) -> Creation:
        """Write a new object, and on a local disk see it through to the platter."""
        name = self._prefix + path
        changed = self._files_changed_by(name)
        with self._explained("write", path):
            try:
                self._objects.put(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return Creation.TAKEN
            _flush(changed)
        return Creation.CREATED

    def read(self, paths: Sequence[ObjectPath]) -> list[bytes | None]:
        """Read objects, many at once where each takes a round trip."""
        if len(paths) < 2 or isinstance(self._objects, LocalStore | MemoryStore):
            return [self._read(path) for path in paths]
        with ThreadPoolExecutor(min(len(paths), _READS_AT_ONCE)) as pool:
            return list(pool.map(self._read, paths))

    def names(self, prefix: ObjectPath) -> list[ObjectPath]:
        """Name every object below `prefix`, in order."""
        with self._explained("list", prefix):
            found = [item["path"] for page in self._objects.list(self._prefix + prefix) for item in page]
        return sorted(ObjectPath(name.removeprefix(self._prefix)) for name in found)

    def delete(self, path: ObjectPath) -> None:
        """Delete an object; it is no error if there is none."""
        with self._explained("delete", path):
            try:
                self._objects.delete(self._prefix + path)
            except FileNotFoundError:
                return

    def top_names(self) -> list[ObjectPath]:
        """Name the objects that lie directly here and not in a folder, in order."""
        prefix = self._prefix.rstrip("/") or None
        with self._explained("list", ObjectPath("*")):
            found = [item["path"] for item in self._objects.list_with_delimiter(prefix)["objects"]]
        return sorted(ObjectPath(name.removeprefix(self._prefix)) for name in found)

    def written_before(self, prefix: ObjectPath, moment: datetime) -> list[ObjectPath]:
        """Name every object below `prefix` that was last written before `moment`, in order."""
        with self._explained("list", prefix):
            items = [item for page in self._objects.list(self._prefix + prefix) for item in page]
        old = [item["path"] for item in items if item["last_modified"] < moment]
        return sorted(ObjectPath(name.removeprefix(self._prefix)) for name in old)

    def size(self, path: ObjectPath) -> int | None:
        """Tell how many bytes an object has; None when there is none."""
        with self._explained("look at", path):
            try:
                return self._objects.head(self._prefix + path)["size"]
            except FileNotFoundError:
                return None

    def read_range(self, path: ObjectPath, start: int, end: int) -> bytes | None:
        """Read the bytes from `start` up to `end`; None when there is no object."""
        with self._explained("read", path):
            try:
                return self._objects.get_range(self._prefix + path, start=start, end=end).to_bytes()
            except FileNotFoundError:
                return None

    def move(self, source: ObjectPath, target: ObjectPath) -> bool:
        """Give an object another name, replacing what had it; False when there is no such object.

        The target appears whole or not at all. Where storage cannot rename, it copies and then deletes by itself, so
        that a move which fails half-way leaves both; moving again completes it.
        """
        name = self._prefix + target
        changed = self._files_changed_by(name)
        with self._explained("move", source):
            try:
                self._objects.rename(self._prefix + source, name)
            except FileNotFoundError:
                return False
            if self._directory is not None:
                _flush([*changed, (self._directory / (self._prefix + source)).parent])
        return True

    def _read(self, path: ObjectPath) -> bytes | None:
        with self._explained("read", path):
            try:
                return self._objects.get(self._prefix + path).bytes().to_bytes()
            except FileNotFoundError:
                return None

    def _files_changed_by(self, name: str) -> list[Path]:
        """The file of a new object on a local disk, the folders that are made for it, and the one that has them."""
        if self._directory is None:
            return []
        changed = [self._directory / name]
        for folder in changed[0].parents:
            changed.append(folder)
            if folder.is_dir():
                break
        return changed

    @contextmanager
    def _explained(self, verb: str, path: ObjectPath) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            cause = str(error).split("\n", 1)[0]
            raise StorageError(f"could not {verb} {self.url}/{path}: {cause}") from error


def open_store(url: str, options: Mapping[str, Any] | None = None) -> ObjectStorage:
    """Open the storage at `url`: a directory, `file://`, `memory://`, `s3://`, `gs://`, `az://` or `abfss://`.

    `options` are obstore's for that kind of storage, credentials for example; without them the usual
    environment variables hold.
    """
    check_url(url)
    if (directory := local_directory(url)) is not None:
        return _open_directory(directory)
    if urlsplit(url).scheme == "memory":
        return ObjectStorage("memory://memory", MemoryStore())
    try:
        return ObjectStorage(url, from_url(url, **(options or {})))
    except (BaseError, ValueError) as error:
        cause = str(error).split("\n", 1)[0]
        raise ConfigurationError(f"the storage {url!r} cannot be opened: {cause}") from error


def check_url(url: str) -> None:
    """Refuse a URL of a kind of storage that there is none of. Nothing is opened."""
    if local_directory(url) is not None:
        return
    scheme = urlsplit(url).scheme
    if not url.startswith(f"{scheme}://") or scheme not in {"memory", *_REMOTE_SCHEMES}:
        raise ConfigurationError(
            f"the storage {url!r} is neither a directory nor a URL that begins with "
            "file://, memory://, s3://, gs://, az:// or abfss://"
        )


def local_directory(url: str) -> Path | None:
    """Tell which directory a storage URL names; None when it names storage of another kind."""
    parts = urlsplit(url)
    if len(parts.scheme) < 2:  # a letter before a colon is a drive
        return Path(url).absolute()
    if not url.startswith("file://"):
        return None
    if parts.netloc:
        raise ConfigurationError(f"the storage {url!r} names a host: a local URL has three slashes, file:///")
    return Path(unquote(parts.path))


def _open_directory(directory: Path) -> ObjectStorage:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the directory {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ConfigurationError(
            f"the directory {directory} cannot be written to: change its permissions or take another"
        )
    return ObjectStorage(str(directory), LocalStore(directory), directory)


def _flush(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
