"""A store that fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import Creation, Store
from arroyo_dagster.model import ObjectPath


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a store, numbered from 1."""

    number: int
    operation: str
    path: str


class Fault(Enum):
    """When a call fails: before it has its effect, or after it, so that it only seems to fail.

    A crash ends the process there: no handler sees it.
    """

    BEFORE = auto()
    AFTER = auto()
    CRASH_BEFORE = auto()
    CRASH_AFTER = auto()


class Crash(BaseException):
    """Stands for the end of the process."""


Faults: TypeAlias = Callable[[Call], Fault | None]


def at_call(number: int, fault: Fault) -> Faults:
    """Fail at the call with that number only."""
    return lambda call: fault if call.number == number else None


class FaultyStore:
    """A `Store` that asks `faults` at every call whether, and when, to fail."""

    def __init__(self, store: Store, faults: Faults = lambda _: None) -> None:
        """Stand in front of `store`."""
        self._store = store
        self.faults = faults
        self.calls: list[Call] = []

    @property
    def url(self) -> str:
        """Where the store behind this is."""
        return self._store.url

    def create(self, path: ObjectPath, data: bytes) -> Creation:
        """Create, or fail."""
        with self._perhaps_failing("create", path):
            return self._store.create(path, data)

    def read(self, paths: Sequence[ObjectPath]) -> list[bytes | None]:
        """Read, or fail. However many objects are read, it is one call."""
        with self._perhaps_failing("read", ", ".join(paths)):
            return self._store.read(paths)

    def names(self, prefix: ObjectPath) -> list[ObjectPath]:
        """List, or fail."""
        with self._perhaps_failing("names", prefix):
            return self._store.names(prefix)

    def delete(self, path: ObjectPath) -> None:
        """Delete, or fail."""
        with self._perhaps_failing("delete", path):
            self._store.delete(path)

    @contextmanager
    def _perhaps_failing(self, operation: str, path: str) -> Iterator[None]:
        call = Call(len(self.calls) + 1, operation, path)
        self.calls.append(call)
        fault = self.faults(call)
        _fail(call, fault, Fault.BEFORE, Fault.CRASH_BEFORE)
        yield
        _fail(call, fault, Fault.AFTER, Fault.CRASH_AFTER)


def _fail(call: Call, fault: Fault | None, error: Fault, crash: Fault) -> None:
    if fault is error:
        raise StorageError(f"an injected fault at call {call.number}: {call.operation} {call.path}")
    if fault is crash:
        raise Crash(f"an injected crash at call {call.number}: {call.operation} {call.path}")
