"""Where a source's files lie: a directory or a bucket that others write to, and that is only looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore import Bytes
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from arroyo_dagster.errors import ConfigurationError, StorageError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that was found. `modified` is in microseconds since 1970."""

    path: str
    size: int
    modified: int


class InputStorage:
    """Lists and reads what lies below a URL. Unlike `open_store`, it makes no directory and needs no right to write."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Open a directory, which must exist, or a URL that obstore knows, with obstore's options for it."""
        self._url = url.rstrip("/")
        directory = local_directory(url)
        self._objects = _open_remote(url, options) if directory is None else _open_directory(directory)

    def files(self) -> list[InputFile]:
        """Find every file, at any depth; those in hidden places, which begin with "_" or ".", are left out."""
        with self._explained("list", self._url):
            return [
                InputFile(found["path"], found["size"], (found["last_modified"] - _EPOCH) // timedelta(microseconds=1))
                for page in self._objects.list()
                for found in page
                if not any(segment.startswith(("_", ".")) for segment in found["path"].split("/"))
            ]

    def read(self, path: str) -> Bytes | None:
        """Read a file, in one piece; None when it is not there."""
        with self._explained("read", f"{self._url}/{path}"):
            try:
                return self._objects.get(path).bytes()
            except FileNotFoundError:
                return None

    @contextmanager
    def _explained(self, verb: str, what: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            cause = str(error).split("\n", 1)[0]
            raise StorageError(f"could not {verb} {what}: {cause}") from error


def local_directory(url: str) -> Path | None:
    """The directory that a path or a `file://` URL names; None for what lies elsewhere."""
    parts = urlsplit(url)
    if len(parts.scheme) < 2:  # a letter before a colon is a drive
        return Path(url).absolute()
    if parts.scheme != "file":
        return None
    if parts.netloc:
        raise ConfigurationError(f"the source {url!r} names a host: a local URL has three slashes, file:///")
    return Path(unquote(parts.path))


def _open_directory(directory: Path) -> ObjectStore:
    if not directory.is_dir():
        remedy = "name the directory that it is in" if directory.exists() else "make it, or correct the source's url"
        raise ConfigurationError(f"the source's directory {directory} is not a directory: {remedy}")
    if not os.access(directory, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ConfigurationError(f"the source's directory {directory} cannot be read: change its permissions")
    return LocalStore(directory)


def _open_remote(url: str, options: Mapping[str, Any] | None) -> ObjectStore:
    if url.startswith("memory:"):
        raise ConfigurationError(f"the source's url {url!r} is a memory that nobody can write to: name a directory")
    try:
        return from_url(url, **(options or {}))
    except (BaseError, ValueError) as error:
        cause = str(error).split("\n", 1)[0]
        raise ConfigurationError(f"the source's url {url!r} cannot be opened: {cause}") from error
