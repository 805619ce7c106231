"""Nexmark-like bids in Parquet for the benchmarks: the same for the same numbers, on every machine.

An epoch is two files, as from two partitions of a topic: the rows alternate between them, so both end at the same time.
`auction` is one of 100,000 keys, skewed as in Zipf's law (the hottest has one bid in seventeen); `bidder` is one of
1,000,000, all equally likely. Event time moves on evenly, and each bid arrives up to two seconds late.
"""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

AUCTIONS, BIDDERS = 100_000, 1_000_000
EVENTS_PER_SECOND = 10_000
FILES_PER_EPOCH = 2
# Three seconds into a ten-second window, so that epochs end inside windows and state is merged across them.
START_US = 1_767_225_603_000_000
DISORDER_US = 2_000_000
SCHEMA = pa.schema(
    [
        pa.field("auction", pa.int64(), nullable=False),
        pa.field("bidder", pa.int64(), nullable=False),
        pa.field("price", pa.int64(), nullable=False),
        pa.field("date_time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)


def write_bids(directory: Path, epochs: int, epoch_events: int) -> list[list[Path]]:
    """The files of each epoch. Those that are there already are kept: a name holds all that the content depends on."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for epoch in range(epochs):
        paths = [directory / f"bids-{epoch_events}-{epoch:05}-{part}.parquet" for part in range(FILES_PER_EPOCH)]
        if not all(path.exists() for path in paths):
            bids = make_bids(epoch, epoch_events)
            for part, path in enumerate(paths):
                pq.write_table(bids.take(np.arange(part, epoch_events, FILES_PER_EPOCH)), path.with_suffix(".partial"))
                os.replace(path.with_suffix(".partial"), path)
        files.append(paths)
    return files


def make_bids(epoch: int, count: int) -> pa.Table:
    random = np.random.default_rng([20_260_101, epoch, count])
    # A power of a uniform number has a density of 1/rank; the product scatters the hot ranks over the keys.
    rank = np.power(float(AUCTIONS), random.random(count)).astype(np.int64) - 1
    time = START_US + (np.arange(count) + epoch * count) * (1_000_000 // EVENTS_PER_SECOND)
    columns = [
        rank * 61_803 % AUCTIONS,
        random.integers(0, BIDDERS, count),
        (np.power(10.0, random.random(count) * 6) * 100).astype(np.int64),
        time - random.integers(0, DISORDER_US, count),
    ]
    return pa.table([pa.array(c).cast(f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
