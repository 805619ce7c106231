"""The log of one pipeline on storage: read its state, extend it by one entry, keep snapshots of the fold.

Whoever creates entry n+1 has extended the log; whoever finds it taken has lost, and decides again. There is no
lock and no database. A snapshot is a cache: it saves time, and deleting it costs nothing else.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pendulum
from pendulum import DateTime

from arroyo_dagster.errors import ConfigurationError, DamagedObjectError, NewerFormatError, ProtocolError, StorageError
from arroyo_dagster.log import names
from arroyo_dagster.log.documents import pack_entry, pack_snapshot, unpack_entry, unpack_snapshot
from arroyo_dagster.log.entries import Entry, Fact
from arroyo_dagster.log.invariants import refusal
from arroyo_dagster.log.state import PipelineState, apply
from arroyo_dagster.log.store import Creation, Store
from arroyo_dagster.model import ObjectPath

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 16
_SNAPSHOTS_KEPT = 2
_FIRST_WINDOW, _LARGEST_WINDOW = 3, 64
_WRITE_TRIES = 4
_FIRST_DELAY = 0.05


@dataclass(frozen=True, slots=True)
class Appended:
    """The fact is in the log; `state` is the state after it."""

    entry: Entry
    state: PipelineState


@dataclass(frozen=True, slots=True)
class Lost:
    """Somebody else wrote that entry first; `state` is the state by now, to decide again from."""

    winner: Entry
    state: PipelineState


@dataclass(frozen=True, slots=True)
class Refused:
    """The fact would break an invariant. Nothing was written."""

    reason: str


Outcome: TypeAlias = Appended | Lost | Refused


class Log:
    """One pipeline's log, in a store that is narrowed to that pipeline.

    `who` tells people who wrote an entry: a user, a run. It need not be unique.
    """

    def __init__(
        self,
        store: Store,
        who: str,
        *,
        clock: Callable[[], DateTime] = lambda: pendulum.now("UTC"),
        sleep: Callable[[float], None] = time.sleep,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        """Open the log; nothing is read or written yet."""
        self._store = store
        self._who = who
        self._clock = clock
        self._sleep = sleep
        self._snapshot_every = snapshot_every
        self._snapshot_at = 0
        self._state: PipelineState | None = None

    def read(self) -> PipelineState:
        """Return the state by now. What was read before is not read again."""
        state = self._follow(self._state) if self._state else None
        if state is None:
            snapshot = self._newest_snapshot()
            state = self._follow(snapshot)
            if state is None:
                raise DamagedObjectError(
                    f"{self._where(names.log_entry(snapshot.sequence))} is lost or replaced, but a snapshot was made "
                    "of it: restore it, or delete the snapshots to go on from what is left of the log"
                )
        self._state = state
        return state

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Read the entries behind number `after`, from the oldest on."""
        window, suspect = _FIRST_WINDOW, 0
        while True:
            first = after + 1
            found = self._store.read([names.log_entry(sequence) for sequence in range(first, first + window)])
            for data in found:
                if data is None:
                    break
                after += 1
                yield self._parse(after, data)
            else:
                window = min(window * 2, _LARGEST_WINDOW)
                continue
            _absent, *later = found[after + 1 - first :]
            if any(data is not None for data in later):
                # Nobody writes an entry before the one that it follows. So the absent one was written
                # while we read, or it is gone: a second look tells.
                if suspect == after + 1:
                    raise DamagedObjectError(f"{self._where(names.log_entry(suspect))} is lost: restore it")
                suspect = after + 1
            elif later:
                return

    def append(self, state: PipelineState, fact: Fact) -> Outcome:
        """Make `fact` the entry that follows `state`.

        Raises `StorageError` when the storage does not tell whether the entry was written: then read the log
        before anything else is concluded.
        """
        writer = f"{self._who}/{secrets.token_hex(8)}"
        entry, data = self._as_read_back(Entry(state.sequence + 1, writer, self._clock(), fact))
        if reason := refusal(state, entry.fact):
            return Refused(reason)
        written = self._write(entry, data)
        if written.writer != entry.writer:
            return Lost(written, self.read())
        self._state = apply(state, entry)
        if self._state.sequence - self._snapshot_at >= self._snapshot_every:
            self._write_snapshot(self._state)
        return Appended(entry, self._state)

    def _follow(self, state: PipelineState) -> PipelineState | None:
        """Fold what has been written behind `state`; None if the log does not lead there."""
        entries = self.entries(after=max(state.sequence - 1, 0))
        if state.created:
            last = next(entries, None)
            if last is None or last.writer != state.writer:
                return None
        for entry in entries:
            if reason := refusal(state, entry.fact):
                raise ProtocolError(
                    f"{self._where(names.log_entry(entry.sequence))} by {entry.writer} contradicts the log: {reason}"
                )
            state = apply(state, entry)
        return state

    def _as_read_back(self, entry: Entry) -> tuple[Entry, bytes]:
        """Return the entry as everybody else will see it: what could not be read must not be written."""
        try:
            data = pack_entry(entry)
            return self._parse(entry.sequence, data), data
        except (TypeError, ValueError, RecursionError, DamagedObjectError) as error:
            kind = type(entry.fact).__name__
            raise ConfigurationError(
                f"this {kind} cannot be written to the log at {self._store.url}: {error}"
            ) from error

    def _write(self, entry: Entry, data: bytes) -> Entry:
        """Create the entry, and return what stands in its place: it, or another's."""
        path = names.log_entry(entry.sequence)
        if entry.sequence == 1:
            self._try_conditional_writes()
        for number in range(_WRITE_TRIES):
            if number:
                self._sleep(_FIRST_DELAY * 2**number)
            try:
                if self._store.create(path, data) is Creation.CREATED:
                    return entry
            except StorageError as error:
                failure = error
            else:
                failure = StorageError("its name is taken, but there is no such object")
            # Taken or unclear: a client may repeat a request whose answer was lost, and find its own object.
            try:
                [found] = self._store.read([path])
            except StorageError as error:
                failure = error
            else:
                if found is not None:
                    return self._parse(entry.sequence, found)
        raise StorageError(
            f"it is not known whether {self._where(path)} was written: {failure}; once the storage answers again, "
            "the log will tell"
        ) from failure

    def _try_conditional_writes(self) -> None:
        probe = names.probe(secrets.token_hex(8))
        self._store.create(probe, b"")
        overwritten = self._store.create(probe, b"") is Creation.CREATED
        self._store.delete(probe)
        if overwritten:
            raise ConfigurationError(
                f"the storage at {self._store.url} overwrites objects that it was asked to create: take one that "
                "supports conditional writes (If-None-Match)"
            )

    def _newest_snapshot(self) -> PipelineState:
        for path in reversed(self._store.names(names.SNAPSHOTS)):
            sequence = names.snapshot_sequence(path)
            [data] = self._store.read([path]) if sequence else [None]
            if sequence is None or data is None:
                continue
            try:
                state = unpack_snapshot(data, sequence, self._where(path))
            except (DamagedObjectError, NewerFormatError) as error:
                logger.warning("%s; the log is read without it", error)
                continue
            self._snapshot_at = sequence
            return state
        return PipelineState()

    def _write_snapshot(self, state: PipelineState) -> None:
        self._snapshot_at = state.sequence
        try:
            self._store.create(names.snapshot(state.sequence), pack_snapshot(state))
            found = ((names.snapshot_sequence(path) or 0, path) for path in self._store.names(names.SNAPSHOTS))
            older = [path for sequence, path in found if 0 < sequence <= state.sequence]
            for path in older[:-_SNAPSHOTS_KEPT]:
                self._store.delete(path)
        except StorageError as error:
            logger.warning("no snapshot was made, which only costs time: %s", error)

    def _parse(self, sequence: int, data: bytes) -> Entry:
        return unpack_entry(data, sequence, self._where(names.log_entry(sequence)))

    def _where(self, path: ObjectPath) -> str:
        return f"{self._store.url}/{path}"
