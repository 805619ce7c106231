"""Channels carry messages from each upstream subtask to each downstream one: Arrow batches, then one barrier.

Spark moves few, large rows: a payload is a compressed Arrow IPC stream, so any Arrow type survives. The barrier tells
how much was sent before it, so that a channel which loses, doubles or mixes up anything is found out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b, sha1

import numpy as np
import pyarrow as pa

from arroyo_dagster.errors import AttemptError
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.model import FileEntry
from arroyo_dagster.state.hashing import key_groups, subtasks_of

MESSAGES = pa.schema(
    [
        ("subtask", pa.int32()),
        ("kind", pa.int32()),
        ("leg", pa.int32()),
        ("sender", pa.int32()),
        ("sequence", pa.int32()),
        ("payload", pa.binary()),
    ]
)
MESSAGE_ORDER = ("kind", "leg", "sender", "sequence")

_PAYLOAD_ROWS = 1 << 18
_PAYLOAD_BYTES = 1 << 26


class Kind(IntEnum):
    """What a message is. Data sorts before barriers."""

    DATA = 0
    BARRIER = 1


@dataclass(frozen=True, slots=True)
class SenderReport:
    """What one upstream subtask has to say about its epoch. Times are in microseconds; `latest` is the latest row's."""

    leg: int
    sender: int
    rows_read: int
    latest: int | None
    rows_sent: int
    late_rows: int
    late_files: tuple[FileEntry, ...]
    quarantined: tuple[str, ...]
    start: int
    micros: int


@dataclass(frozen=True, slots=True)
class ChannelBarrier:
    """The end of an epoch on one channel.

    `rows` and `messages` were sent on this channel before it; `rows_read` and `latest` tell what the sender read
    altogether, and when the latest of it happened. `output` is a digest of all that the sender has sent on all of its
    channels: a task that is tried again must not tell different subtasks different things. The first subtask also
    gets the sender's report.
    """

    epoch: int
    attempt: int
    rows: int
    messages: int
    rows_read: int
    latest: int | None
    output: str
    report: SenderReport | None


class Sender:
    """The upstream end of all channels of one upstream subtask."""

    def __init__(self, leg: int, sender: int, parallelism: int, keys: Sequence[str], groups: int) -> None:
        """Route by `keys` to `parallelism` subtasks; without keys everything goes to the first."""
        self._leg = leg
        self._sender = sender
        self._parallelism = parallelism
        self._keys = keys
        self._groups = groups
        self._rows = [0] * parallelism
        self._messages = [0] * parallelism
        self._output = blake2b(digest_size=16)

    @property
    def rows_sent(self) -> int:
        """How many rows were sent on all channels."""
        return sum(self._rows)

    def send(self, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Put rows on the channels of the subtasks that own their keys."""
        for subtask, part in enumerate(self._routed(rows)):
            size = max(1, min(_PAYLOAD_ROWS, part.num_rows * _PAYLOAD_BYTES // max(part.nbytes, 1)))
            for batch in part.combine_chunks().to_batches(max_chunksize=size) if part.num_rows else ():
                payload = _pack(batch)
                yield self._message(subtask, Kind.DATA, self._messages[subtask], payload)
                self._output.update(subtask.to_bytes(4, "big"))
                self._output.update(sha1(payload, usedforsecurity=False).digest())
                self._rows[subtask] += batch.num_rows
                self._messages[subtask] += 1

    def barriers(self, epoch: int, attempt: int, report: SenderReport) -> Iterator[pa.RecordBatch]:
        """End the epoch on every channel."""
        for subtask, (rows, messages) in enumerate(zip(self._rows, self._messages, strict=True)):
            barrier = ChannelBarrier(
                epoch,
                attempt,
                rows,
                messages,
                report.rows_read,
                report.latest,
                self._output.hexdigest(),
                None if subtask else report,
            )
            yield self._message(subtask, Kind.BARRIER, 0, pa.py_buffer(json.dumps(encode(barrier)).encode()))

    def _routed(self, rows: pa.Table) -> Iterator[pa.Table]:
        missing = [key for key in self._keys if key not in rows.column_names]
        if missing:
            raise AttemptError(
                f"the stream has no column {missing[0]!r} to be keyed by; it has {', '.join(rows.column_names)}"
            )
        if self._parallelism == 1 or not rows.num_rows:
            yield rows
            return
        groups = key_groups([rows[key] for key in self._keys], self._groups)
        targets = subtasks_of(groups, self._groups, self._parallelism).astype(np.uint16)  # small numbers sort fast
        ordered = _without_views(rows).take(pa.array(np.argsort(targets, kind="stable")))
        ends = np.cumsum(np.bincount(targets, minlength=self._parallelism)).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            yield ordered.slice(start, end - start)

    def _message(self, subtask: int, kind: Kind, sequence: int, payload: pa.Buffer) -> pa.RecordBatch:
        values = [subtask, int(kind), self._leg, self._sender, sequence]
        columns = [pa.array([value], pa.int32()) for value in values]
        offsets = pa.array([0, payload.size], pa.int32()).buffers()[1]
        content = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, payload])  # not copied
        return pa.RecordBatch.from_arrays([*columns, content], schema=MESSAGES)


class Receiver:
    """The downstream end of all channels of one subtask, which are aligned once every one has had its barrier.

    `senders` tells how many upstream subtasks each leg has, `origins` what to call the legs.
    """

    def __init__(
        self, stage: str, subtask: int, epoch: int, attempt: int, senders: Sequence[int], origins: Sequence[str]
    ) -> None:
        """Expect one barrier from each sender of each leg."""
        self._stage = stage
        self._subtask = subtask
        self._epoch = epoch
        self._attempt = attempt
        self._senders = senders
        self._origins = origins
        self._rows: dict[tuple[int, int], int] = {}
        self._next: dict[tuple[int, int], int] = {}
        self.barriers: dict[tuple[int, int], ChannelBarrier] = {}

    def batches(self, messages: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Take messages in, and give the batches out, each with the leg that it came by."""
        for received in messages:
            legs, senders, kinds, sequences = (
                received.column(name).to_pylist() for name in ("leg", "sender", "kind", "sequence")
            )
            payloads = received.column("payload")
            for row, (leg, sender, kind, sequence) in enumerate(zip(legs, senders, kinds, sequences, strict=True)):
                content = payloads[row].as_buffer()
                if kind == Kind.BARRIER:
                    self._take_barrier((leg, sender), content)
                else:
                    for batch in self._take_data((leg, sender), sequence, content):
                        yield leg, batch

    def align(self) -> Mapping[tuple[int, int], ChannelBarrier]:
        """See that every channel has delivered its barrier, and all that was sent before it."""
        for leg, count in enumerate(self._senders):
            for sender in range(count):
                channel = (leg, sender)
                barrier = self.barriers.get(channel)
                if barrier is None:
                    raise self._broken(channel, "has delivered no barrier")
                messages, rows = self._next.get(channel, 0), self._rows.get(channel, 0)
                if (messages, rows) != (barrier.messages, barrier.rows):
                    raise self._broken(
                        channel,
                        f"has delivered {rows} rows in {messages} batches, "
                        f"where {barrier.rows} rows in {barrier.messages} batches were sent",
                    )
        return self.barriers

    def _take_barrier(self, channel: tuple[int, int], content: pa.Buffer) -> None:
        barrier = decode(ChannelBarrier, json.loads(content.to_pybytes()), self._name(channel))
        self._check_known(channel)
        if (barrier.epoch, barrier.attempt) != (self._epoch, self._attempt):
            raise self._broken(
                channel,
                f"has delivered the barrier of epoch {barrier.epoch}, attempt {barrier.attempt}, "
                f"in epoch {self._epoch}, attempt {self._attempt}",
            )
        if channel in self.barriers:
            raise self._broken(channel, "has delivered its barrier twice")
        self.barriers[channel] = barrier

    def _take_data(self, channel: tuple[int, int], sequence: int, content: pa.Buffer) -> Iterator[pa.RecordBatch]:
        self._check_known(channel)
        expected = self._next.get(channel, 0)
        if sequence != expected:
            what = "twice" if sequence < expected else f"where batch {expected} was due"
            raise self._broken(channel, f"has delivered batch {sequence} {what}")
        self._next[channel] = sequence + 1
        for batch in pa.ipc.open_stream(content):
            self._rows[channel] = self._rows.get(channel, 0) + batch.num_rows
            yield batch

    def _check_known(self, channel: tuple[int, int]) -> None:
        leg, sender = channel
        if not (0 <= leg < len(self._senders) and 0 <= sender < self._senders[leg]):
            raise self._broken(channel, "is none that this epoch has")

    def _name(self, channel: tuple[int, int]) -> str:
        leg, sender = channel
        origin = self._origins[leg] if 0 <= leg < len(self._origins) else f"leg {leg}"
        return f"the channel from {origin}[{sender}] to {self._stage}[{self._subtask}]"

    def _broken(self, channel: tuple[int, int], what: str) -> AttemptError:
        return AttemptError(f"{self._name(channel)} {what}; nothing of this attempt is committed")


def _without_views(rows: pa.Table) -> pa.Table:
    """Arrow cannot take from columns of views."""
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    if not any(kind in plain for kind in rows.schema.types):
        return rows
    return rows.cast(pa.schema([field.with_type(plain.get(field.type, field.type)) for field in rows.schema]))


def _pack(batch: pa.RecordBatch) -> pa.Buffer:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    return out.getvalue()
