"""An epoch in a handful of numbers."""

from dataclasses import replace

from arroyo_dagster.model import (
    CheckpointBarrier,
    FileEntry,
    Manifest,
    ObjectPath,
    OperatorRecord,
    Plan,
    SourceRecord,
    Span,
    StagedOutput,
    TableFiles,
)
from arroyo_dagster.summary import summarize
from tests.facts import NOON

THIS, OTHER, BEFORE = (f"epochs/{epoch:020d}/attempt-{attempt}" for epoch, attempt in ((7, 1), (7, 11), (6, 1)))


def entry(path: str, rows: int, size: int) -> FileEntry:
    return FileEntry(ObjectPath(path), rows, size, None, None, "c", "d")


OWN, OLD, EARLIER = entry(f"{THIS}/a/t/1", 10, 100), entry(f"{BEFORE}/a/t/1", 20, 200), entry(f"{OTHER}/a/t/1", 40, 400)

MANIFEST = Manifest(
    CheckpointBarrier(7, 3, NOON, then_stop=False),
    attempt=1,
    parent=6,
    plan=Plan(),
    tables=(TableFiles("a", "t", (OWN, OLD, EARLIER)), TableFiles("a", "u", (OLD,))),
    staged=(StagedOutput("x", (entry("x/1", 3, 1), entry("x/2", 4, 1))), StagedOutput("y", (entry("y/1", 5, 1),))),
    sources=(SourceRecord("s", 1000, None, NOON), SourceRecord("r", 1, None, NOON)),
    operators=(OperatorRecord("a", 2, None, 900, 12, 2), OperatorRecord("b", 2, None, 12, 12, 5)),
    spans=(
        Span("a", 0, "read", 0, 1000),
        Span("a", 1, "read", 0, 7000),
        Span("b", 0, "read", 0, 2000),
        Span("a", 0, "align", 0, 499),
        Span("a", 0, "handle_checkpoint", 0, 500),
        Span("a", 0, "persist", 0, 3000),
        Span("a", 1, "persist", 9000, 2000),
    ),
)


def test_rows_are_those_of_sources_and_sinks_and_late_rows_those_of_operators() -> None:
    summary = summarize(MANIFEST)
    assert (summary.epoch, summary.attempt, summary.parent) == (7, 1, 6)
    assert (summary.rows_in, summary.rows_out, summary.late_rows) == (1001, 12, 7)


def test_a_file_counts_once_however_many_tables_name_it() -> None:
    summary = summarize(MANIFEST)
    assert (summary.files, summary.state_rows, summary.state_bytes) == (3, 70, 700)


def test_the_delta_is_what_attempts_at_this_epoch_have_written() -> None:
    summary = summarize(MANIFEST)
    assert (summary.delta_files, summary.delta_rows, summary.delta_bytes) == (2, 50, 500)


def test_a_step_takes_as_long_as_its_slowest_subtask_in_every_stage() -> None:
    summary = summarize(MANIFEST)
    assert (summary.read_ms, summary.align_ms, summary.checkpoint_ms, summary.persist_ms) == (9, 0, 1, 3)
    assert (summary.restore_ms, summary.process_ms, summary.emit_ms) == (0, 0, 0)


def test_publishing_takes_what_was_measured_if_it_was() -> None:
    assert summarize(MANIFEST).publish_ms is None
    assert summarize(MANIFEST, 1_499).publish_ms == 1


def test_an_epoch_with_nothing_in_it_is_all_zeros() -> None:
    summary = summarize(replace(MANIFEST, tables=(), staged=(), sources=(), operators=(), spans=()))
    assert (summary.rows_in, summary.state_bytes, summary.files, summary.read_ms) == (0, 0, 0, 0)
