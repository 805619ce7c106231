"""What an epoch of windowed counting costs: ours, Structured Streaming with both of its state stores, and DuckDB.

    uv run python -m benchmarks.windowed --events 10000000 --json

Tumbling 10-second count and maximum price per key, over bids in Parquet (see `benchmarks/bids.py`), in epochs of a
million: by auction (100,000 keys, skewed) and by bidder (1,000,000 keys, uniform). One Spark session, the same cores
and the same files for all; the peers take turns epoch by epoch, so that a busy moment of the machine touches all alike.

No time counts before the answers are equal: what each peer has published must be exactly the rows that DuckDB finds
for the windows that the peer's watermark has closed, every one of them once. Structured Streaming closes a window one
batch later than we do, so its bound is one epoch lower. Anything else ends the benchmark with exit status 1.

How to read it: seconds are the median over the epochs after the first two, which are for warming up; in brackets, the
least and the most. `x ours` is how many times as long as ours a peer took. Bytes are those of state written per epoch.
DuckDB takes everything in one batch, keeps no state and can resume nothing: its time divided by the number of epochs is
the limit. `checkpoint` is the share of our epoch that `handle_checkpoint` and persisting the tables take. Windows are
closed before it and after the barrier's alignment: the share from there to durable state is given as well.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import SparkSession

from arroyo_dagster.spark import local_session
from benchmarks.bids import FILES_PER_EPOCH, write_bids
from benchmarks.windowed_peers import (
    SESSION,
    WATERMARK_DELAY_US,
    Peer,
    bytes_under,
    run_duckdb,
    start_ours,
    start_streaming,
)

CASES = {"skewed": ("100k skewed", "auction"), "uniform": ("1M uniform", "bidder")}
PEERS = ("ours", "rocksdb", "default")
WARM_UP = 2


class UnequalError(Exception):
    """A peer's answer is not the right one."""


def measure(
    spark: SparkSession, case: str, epochs: list[list[Path]], peers: list[str], work: Path, cores: int
) -> dict[str, Any]:
    """One case: all peers in turns, then the comparison of their answers, then the numbers."""
    label, key = CASES[case]
    running: dict[str, Peer] = {}
    times: dict[str, list[float]] = {name: [] for name in peers}
    try:
        for name in peers:
            running[name] = (
                start_ours(spark, epochs[0][0].parent, key, work / name, cores, FILES_PER_EPOCH)
                if name == "ours"
                else start_streaming(spark, name, epochs, key, work / name)
            )
        for epoch in range(len(epochs)):
            for name, peer in running.items():
                times[name].append(peer.step(epoch))
            report_progress(label, epoch, times)
    finally:
        for peer in running.values():
            peer.close()
    answer = work / "duckdb.parquet"
    every_file = [path for files in epochs for path in files]
    duckdb_seconds = statistics.median(run_duckdb(every_file, key, answer, cores) for _ in range(3))
    for name, peer in running.items():
        compare(name, peer, key, answer, epochs)
    return summarize(label, times, running, duckdb_seconds, len(epochs))


def compare(name: str, peer: Peer, key: str, answer: Path, epochs: list[list[Path]]) -> None:
    """Raise unless the peer has published each window that its watermark has closed, once, and no other."""
    connection = duckdb.connect()
    seen = [str(path) for files in epochs[: len(epochs) - peer.lag] for path in files]
    latest = connection.execute("SELECT max(epoch_us(date_time)) FROM read_parquet(?)", [seen]).fetchall()[0][0]
    columns = f"{key}, epoch_us(window_start) AS window_start, epoch_us(window_end) AS window_end, bids, top"
    for view, files, condition in (
        ("published", peer.output / "**" / "*.parquet", "true"),
        ("expected", answer, f"epoch_us(window_end) <= {latest - WATERMARK_DELAY_US}"),
    ):
        connection.execute(f"CREATE TABLE {view} AS SELECT {columns} FROM read_parquet('{files}') WHERE {condition}")  # noqa: S608
    if not connection.execute("SELECT count(*) FROM expected").fetchall()[0][0]:
        raise UnequalError(f"{name}: no window was closed, so there is nothing to compare: use more events")
    for one, other in (("published", "expected"), ("expected", "published")):
        difference = f"FROM (FROM {one} EXCEPT ALL FROM {other})"
        if rows := connection.execute(f"SELECT * {difference} ORDER BY ALL LIMIT 3").fetchall():
            count = connection.execute(f"SELECT count(*) {difference}").fetchall()[0][0]
            raise UnequalError(f"{name} by {key}: {count} rows are {one} and not {other}, the first of them {rows}")


def report_progress(label: str, epoch: int, times: dict[str, list[float]]) -> None:
    print(
        f"{label}, epoch {epoch + 1}:", *(f"{n} {t[-1]:.2f} s" for n, t in times.items()), file=sys.stderr, flush=True
    )


def summarize(
    label: str, times: dict[str, list[float]], running: dict[str, Peer], duckdb_seconds: float, epochs: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": label, "epochs": epochs, "duckdb_s": duckdb_seconds / epochs}
    for name in PEERS:
        warm = times.get(name, [])[WARM_UP:]
        row[f"{name}_s"] = statistics.median(warm) if warm else None
        row[f"{name}_min_s"], row[f"{name}_max_s"] = (min(warm), max(warm)) if warm else (None, None)
        row[f"{name}_bytes"] = bytes_under(running[name].state) // epochs if name in running else None
    for name in PEERS[1:]:
        both = row["ours_s"] is not None and row[f"{name}_s"] is not None
        row[f"ratio_{name}"] = row[f"{name}_s"] / row["ours_s"] if both else None
    shares = running["ours"].shares[WARM_UP:] if "ours" in running else []
    row["checkpoint_share"] = statistics.median(s.checkpoint for s in shares) if shares else None
    row["aligned_to_durable_share"] = statistics.median(s.aligned_to_durable for s in shares) if shares else None
    return row


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{'':<12} {'peer':<8} {'s per epoch':>12} {'(least, most)':>16} {'x ours':>7} {'state bytes':>12}")
    for row in results:
        for name in PEERS:
            if row[f"{name}_s"] is None:
                continue
            spread = f"({row[f'{name}_min_s']:.2f}, {row[f'{name}_max_s']:.2f})"
            ratio = row.get(f"ratio_{name}")
            print(
                f"{row['case']:<12} {name:<8} {row[f'{name}_s']:>12.3f} {spread:>16} "
                f"{f'{ratio:.1f}' if ratio else '':>7} {row[f'{name}_bytes']:>12,}"
            )
        print(f"{row['case']:<12} {'duckdb':<8} {row['duckdb_s']:>12.3f}")
        if row["checkpoint_share"] is not None:
            print(
                f"{row['case']:<12} checkpoint: {row['checkpoint_share']:.1%} of our epoch; "
                f"with closing windows {row['aligned_to_durable_share']:.1%}"
            )


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: some of the known names, separated by commas, in the known order."""

    def parse(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := set(asked) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
        return [name for name in known if name in asked]

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--epoch-events", type=int, default=1_000_000)
    parser.add_argument("--cases", type=names(CASES), default=list(CASES), help="of skewed,uniform")
    parser.add_argument("--peers", type=names((*PEERS, "duckdb")), default=list(PEERS), help="of ours,rocksdb,default")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--data", type=Path, help="where bids are kept from run to run; else they are made anew")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    epochs = arguments.events // arguments.epoch_events
    if epochs <= WARM_UP:
        parser.error(f"{epochs} epochs: the first {WARM_UP} are for warming up, so at least {WARM_UP + 1} are needed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        data = (arguments.data or Path(root)) / f"{epochs}x{arguments.epoch_events}"
        files = write_bids(data, epochs, arguments.epoch_events)
        spark = local_session(arguments.cores, {**SESSION, "spark.sql.shuffle.partitions": str(arguments.cores)})
        peers = [name for name in arguments.peers if name in PEERS]  # DuckDB runs always: it has the right answer
        try:
            results = []
            for case in arguments.cases:
                results.append(measure(spark, case, files, peers, Path(root, case), arguments.cores))
                shutil.rmtree(Path(root, case), ignore_errors=True)
        except UnequalError as error:
            sys.exit(str(error))
        finally:
            spark.stop()
    if arguments.json:
        print(json.dumps({"results": results}))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
