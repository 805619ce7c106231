"""What a windowed aggregate should have come to, worked out by DuckDB from the raw rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pendulum
import pyarrow as pa

from arroyo_dagster import Pipeline, agg
from arroyo_dagster.dataflow.agg import Aggregate, AggregateKind
from arroyo_dagster.engine import Engine, Taken

_SQL = {
    AggregateKind.COUNT: "count",
    AggregateKind.SUM: "sum",
    AggregateKind.MIN: "min",
    AggregateKind.MAX: "max",
    AggregateKind.MEAN: "avg",
    AggregateKind.STDDEV: "stddev_samp",
}


def take_epochs(engine: Engine, count: int) -> list[Taken]:
    """Take epochs one after the other, without waiting for the interval."""
    policy = replace(engine.pipeline.policy, interval=pendulum.duration(microseconds=1), backoff=pendulum.duration())
    taken = []
    for _ in range(count):
        outcome = engine.run_epoch(policy=policy)
        assert isinstance(outcome, Taken), outcome
        taken.append(outcome)
    return taken


def epochs_of(rows: pa.Table, cuts: Sequence[int]) -> pa.Table:
    """The rows that the cuts let through, each with the number of its epoch."""
    numbers: list[int] = []
    for epoch, (first, last) in enumerate(zip([0, *cuts], cuts, strict=False), 1):
        numbers += [epoch] * (last - first)
    return rows.slice(0, len(numbers)).append_column("epoch", pa.array(numbers, pa.int64()))


def windows(
    rows: pa.Table,
    *,
    epochs: int,
    keys: Sequence[str],
    time: str,
    size: int,
    delay: int,
    aggregates: Mapping[str, Aggregate],
    late: bool = False,
) -> list[tuple[Any, ...]]:
    """The rows of all windows that are closed after the last epoch; or the number of rows that came too late.

    `rows` have their epoch. Times are in seconds.
    """
    columns = []
    for name, aggregate in aggregates.items():
        column = f'"{aggregate.column}"' if aggregate.column else "*"
        if aggregate.kind is AggregateKind.COUNT_DISTINCT:
            columns.append(f"count(DISTINCT {column}) AS {name}")
        else:
            columns.append(f"{_SQL[aggregate.kind]}({column}) AS {name}")
    key_list = ", ".join(keys)
    query = f"""
        WITH numbered AS (SELECT *, floor(epoch_us("{time}") / {size * 1e6})::BIGINT * {size} AS start FROM rows),
        epochs AS (SELECT unnest(range(1, {epochs} + 1)) AS epoch),
        latest AS (SELECT epochs.epoch, max(epoch_us("{time}")) AS latest
                   FROM epochs LEFT JOIN rows ON rows.epoch = epochs.epoch GROUP BY ALL),
        marks AS (SELECT epoch, max(latest) OVER (ORDER BY epoch) - {delay} * 1000000 AS mark FROM latest),
        judged AS (SELECT numbered.*, start IS NULL OR coalesce((start + {size}) * 1000000 <= mark, false) AS late
                   FROM numbered LEFT JOIN marks ON marks.epoch = numbered.epoch - 1)
        """
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", rows)
        if late:
            return connection.execute(query + "SELECT count(*) FROM judged WHERE late").fetchall()
        query += f"""
            SELECT {key_list}, make_timestamp(start * 1000000) AS window_start, {", ".join(columns)}
            FROM judged WHERE NOT late GROUP BY {key_list}, start
            HAVING (start + {size}) * 1000000 <= (SELECT max(mark) FROM marks) ORDER BY ALL"""
        return _plain(connection.execute(query).fetchall())


def published(directory: Path, keys: Sequence[str], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """The rows that a Parquet sink shows for a windowed aggregate."""
    if not list(directory.glob("*.parquet")):
        return []
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        columns = ", ".join([*keys, "window_start::TIMESTAMP AS window_start", *names])
        return _plain(connection.execute(f"SELECT {columns} FROM '{directory}/*.parquet' ORDER BY ALL").fetchall())


def _plain(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Floats up to the last bits, which depend on the order of addition."""
    return [tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in row) for row in rows]


def count_and_max(pipeline: Pipeline, stream: Any, sink: Any) -> None:
    """The smallest windowed pipeline."""
    stream.key_by("k").tumble("10 seconds").aggregate("stats", n=agg.count(), top=agg.max("v")).sink("out", sink)
