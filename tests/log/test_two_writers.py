"""Two processes that extend one log as fast as they can."""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from arroyo_dagster.log import Log, ObjectStorage, open_store
from tests.facts import CREATED, append, append_epoch

APPENDS = 200

WRITER = """
import json, sys
from arroyo_dagster.log import Appended, Log, Lost, open_store
from arroyo_dagster.log.entries import EpochPinned

url, options, who, appends = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
log = Log(open_store(url, options).below("auctions"), who)
print("ready", flush=True)
sys.stdin.readline()
lost = 0
for number in range(appends):
    state = log.read()
    while not isinstance(outcome := log.append(state, EpochPinned(1, f"{who} {number}")), Appended):
        assert isinstance(outcome, Lost), outcome
        lost, state = lost + 1, outcome.state
print(lost, flush=True)
"""


@pytest.fixture(params=["local disk", "S3"])
def place(request: pytest.FixtureRequest) -> tuple[ObjectStorage, dict[str, Any]]:
    if request.param == "S3":
        options: dict[str, Any] = request.getfixturevalue("s3_options")
        return request.getfixturevalue("s3_store"), options
    return request.getfixturevalue("local_store"), {}


def test_lose_nothing_and_write_no_number_twice(place: tuple[ObjectStorage, dict[str, Any]]) -> None:
    store, options = place
    log = Log(store.below("auctions"), "setup")
    append(log, CREATED)
    append_epoch(log)
    before = log.read().sequence
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, store.url, json.dumps(options), who, str(APPENDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for who in ("ann", "bob")
    ]
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()
    lost = 0
    for writer in writers:
        output, _ = writer.communicate(timeout=240)
        assert writer.returncode == 0
        lost += int(output)

    entries = list(Log(open_store(store.url, options).below("auctions"), "auditor").entries(after=before))
    assert [entry.sequence for entry in entries] == list(range(before + 1, before + 1 + 2 * APPENDS))
    assert len({entry.writer for entry in entries}) == 2 * APPENDS
    assert Counter(entry.fact for entry in entries).most_common(1)[0][1] == 1
    assert Counter(entry.writer.split("/")[0] for entry in entries) == {"ann": APPENDS, "bob": APPENDS}
    assert lost > 0, "the two never met, so this has shown nothing"
