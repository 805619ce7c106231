"""The stored documents, log entries, snapshots and manifests: versioned JSON with a checksum of its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import cast, get_args

from pendulum import DateTime

from arroyo_dagster.errors import DamagedObjectError, NewerFormatError
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.log.entries import Entry, Fact
from arroyo_dagster.log.state import PipelineState
from arroyo_dagster.model import JsonValue, Manifest

VERSION = 1

_FACTS: Mapping[str, type[Fact]] = {kind.__name__: kind for kind in get_args(Fact)}


def pack(body: Mapping[str, JsonValue]) -> bytes:
    """Write a document."""
    document: dict[str, JsonValue] = {"version": VERSION, **body}
    return (json.dumps({**document, "checksum": _checksum(document)}, allow_nan=False) + "\n").encode()


def unpack(data: bytes, where: str) -> dict[str, JsonValue]:
    """Read a document. `where` names the object in errors."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedObjectError(f"{where} is damaged or not ours: it is not whole, valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise DamagedObjectError(f"{where} is not ours: it holds no JSON object")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise NewerFormatError(
            f"{where} has format {version}, and this release reads up to {VERSION}: upgrade arroyo_dagster"
        )
    if type(version) is not int or version != VERSION:
        raise DamagedObjectError(f"{where} is not ours: its format version is {version!r}")
    checksum = document.pop("checksum", None)
    if checksum != _checksum(document):
        raise DamagedObjectError(f"{where} is damaged: its content does not match its checksum")
    del document["version"]
    return cast("dict[str, JsonValue]", document)


def pack_entry(entry: Entry) -> bytes:
    """Write an entry: the envelope, and the fact's own fields beside it."""
    return pack(
        {
            "sequence": entry.sequence,
            "writer": entry.writer,
            "timestamp": encode(entry.timestamp),
            "entry": type(entry.fact).__name__,
            **cast("dict[str, JsonValue]", encode(entry.fact)),
        }
    )


def unpack_entry(data: bytes, sequence: int, where: str) -> Entry:
    """Read the entry with that number. `where` names the object in errors."""
    body = unpack(data, where)
    try:
        envelope = [body.pop(name) for name in ("sequence", "writer", "timestamp", "entry")]
    except KeyError as error:
        raise DamagedObjectError(f"{where} is not a log entry: it has no field {error}") from error
    if decode(int, envelope[0], where) != sequence:
        raise DamagedObjectError(f"{where} is misplaced: it holds entry {envelope[0]}")
    kind = _FACTS.get(str(envelope[3]))
    if kind is None:
        raise DamagedObjectError(f"{where} is not ours: there is no entry of type {envelope[3]!r}")
    return Entry(
        sequence, decode(str, envelope[1], where), decode(DateTime, envelope[2], where), decode(kind, body, where)
    )


def pack_snapshot(state: PipelineState) -> bytes:
    """Write a snapshot."""
    return pack(cast("dict[str, JsonValue]", encode(state)))


def unpack_snapshot(data: bytes, sequence: int, where: str) -> PipelineState:
    """Read the snapshot that stands behind that entry. `where` names the object in errors."""
    state = decode(PipelineState, unpack(data, where), where)
    if state.sequence != sequence:
        raise DamagedObjectError(f"{where} is misplaced: it stands behind entry {state.sequence}")
    return state


def pack_manifest(manifest: Manifest) -> bytes:
    """Write a manifest."""
    return pack(cast("dict[str, JsonValue]", encode(manifest)))


def unpack_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest. `where` names the object in errors."""
    return decode(Manifest, unpack(data, where), where)


def _checksum(document: Mapping[str, JsonValue]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=16).hexdigest()
