"""Every object name of a pipeline, built and parsed here and nowhere else.

<state url>/<pipeline>/log/<20 digits>.json                              one entry of the log
                       snapshots/<20 digits>.json                        a fold of the log up to there
                       probes/<token>                                    made and deleted to try the storage
                       epochs/<20 digits>/attempt-<n>/manifest.json      what an attempt has made (replay-<n>: none)
                                                      <stage>/<table>/<token>.parquet    a file of a state table
                                                      <stage>/exchange/<token>.arrow     rows for a later stage
                       handovers/<run>/<step>.json                       what a run's ops give to each other
"""

import re

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.model import ObjectPath

SNAPSHOTS = ObjectPath("snapshots")
EPOCHS = ObjectPath("epochs")

_PIPELINE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_MANIFEST = re.compile(r"epochs/\d{20}/attempt-\d+/manifest\.json")
_SNAPSHOT = re.compile(r"snapshots/(\d{20})\.json")


def pipeline(name: str) -> ObjectPath:
    """Name the prefix that all of a pipeline lies below. Its name must do for Dagster as well."""
    if not _PIPELINE.fullmatch(name):
        raise ConfigurationError(
            f"the pipeline name {name!r} is not usable: take up to 100 ASCII letters, digits and underscores, "
            "and begin with a letter"
        )
    return ObjectPath(name)


def log_entry(sequence: int) -> ObjectPath:
    """Name the log entry with that number."""
    return ObjectPath(f"log/{sequence:020d}.json")


def snapshot(sequence: int) -> ObjectPath:
    """Name the snapshot of the state right after that log entry."""
    return ObjectPath(f"{SNAPSHOTS}/{sequence:020d}.json")


def snapshot_sequence(path: str) -> int | None:
    """Tell which log entry a snapshot stands behind; None for any other object."""
    match = _SNAPSHOT.fullmatch(path)
    return int(match[1]) if match else None


def probe(token: str) -> ObjectPath:
    """Name an object that is made to see what the storage does, and deleted again."""
    return ObjectPath(f"probes/{token}")


def epoch(number: int) -> ObjectPath:
    """Name the prefix that all attempts at an epoch write under."""
    return ObjectPath(f"{EPOCHS}/{number:020d}")


def attempt(epoch_number: int, number: int) -> ObjectPath:
    """Name the prefix that one attempt at an epoch writes under."""
    return ObjectPath(f"{epoch(epoch_number)}/attempt-{number}")


def replay(epoch_number: int, number: int) -> ObjectPath:
    """Name the prefix that one replay of an epoch writes under."""
    return ObjectPath(f"{epoch(epoch_number)}/replay-{number}")


def manifest(epoch_number: int, number: int) -> ObjectPath:
    """Name the manifest of one attempt at an epoch."""
    return ObjectPath(f"{attempt(epoch_number, number)}/manifest.json")


def is_manifest(path: str) -> bool:
    """Tell whether an object is a manifest."""
    return _MANIFEST.fullmatch(path) is not None


def stage(directory: ObjectPath, name: str) -> ObjectPath:
    """Name the prefix that one stage of an attempt or a replay, which writes below `directory`, writes under."""
    return ObjectPath(f"{directory}/{name}")


def table_file(directory: ObjectPath, table: str, token: str) -> ObjectPath:
    """Name a file of a state table of a stage; the token is unique."""
    return ObjectPath(f"{directory}/{table}/{token}.parquet")


def exchange_file(directory: ObjectPath, token: str) -> ObjectPath:
    """Name a file of rows that a stage leaves for later ones; the token is unique."""
    return ObjectPath(f"{directory}/exchange/{token}.arrow")


def handover(run_id: str, step: str) -> ObjectPath:
    """Name what a step of an orchestrator's run leaves for those behind it."""
    return ObjectPath(f"{handovers(run_id)}/{step}.json")


def handovers(run_id: str) -> ObjectPath:
    """Name the prefix of all that the steps of a run leave for each other."""
    return ObjectPath(f"handovers/{run_id}")
