"""Columns of times as microseconds since 1970."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def to_micros(times: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Timestamps of any unit and zone as microseconds. A part of a microsecond is cut off towards the past."""
    if times.type.unit != "ns":
        return times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    nanos = times.cast(pa.int64())
    micros = pc.divide(nanos, 1000)  # rounds towards zero
    return pc.subtract(micros, pc.less(nanos, pc.multiply(micros, 1000)).cast(pa.int64()))
