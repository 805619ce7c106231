"""Whenever the process is killed, another one goes on from the log, and in the end the output is exactly right."""

import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from tests.engine.crashes import EPOCHS


@pytest.mark.parametrize(
    ("kind", "first", "stride", "most"),
    [("steps", 1, 1, 1000), ("storage", 1, 7, 1000), ("moments", 1, 1, 12)],
)
def test_the_output_is_exactly_right_in_the_end(tmp_path: Path, kind: str, first: int, stride: int, most: int) -> None:
    command = [sys.executable, "-m", "tests.engine.crashes", str(tmp_path), kind, str(first), str(stride), str(most)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stderr
    lives = [path for path in tmp_path.iterdir() if path.name != "rows"]
    assert len(lives) >= {"steps": 25, "storage": 10, "moments": 12}[kind]
    expected = oracle(tmp_path / "rows")
    for life in lives:
        assert output(life) == expected, life
        assert json.loads((life / "problems.json").read_text()) == []


def oracle(rows: Path) -> list[list[tuple[object, ...]]]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        windows = f"""
            SELECT k, epoch_us(time_bucket(INTERVAL 10 SECONDS, t)) AS start, count(*), max(v)
            FROM '{rows}/*.parquet' GROUP BY k, start
            HAVING start + 10000000 <= (SELECT epoch_us(max(t)) - 5000000 FROM '{rows}/*.parquet') ORDER BY ALL"""
        parts = " UNION ALL ".join(
            f"SELECT {epoch} AS epoch, * FROM '{rows}/{number}.parquet'"
            for epoch in range(1, EPOCHS + 1)
            for number in range(epoch)
        )
        totals = f"""
            SELECT k, sum(v)::BIGINT, epoch FROM ({parts}) AS upto
            WHERE EXISTS (SELECT 1 FROM ({parts}) AS now WHERE now.epoch = upto.epoch AND now.k = upto.k)
            GROUP BY k, epoch ORDER BY ALL"""
        return [connection.execute(windows).fetchall(), connection.execute(totals).fetchall()]


def output(life: Path) -> list[list[tuple[object, ...]]]:
    closed = DeltaTable(str(life / "closed")).to_pyarrow_table()
    with duckdb.connect() as connection:
        connection.register("closed", closed)
        windows = "SELECT k, epoch_us(window_start), n, top FROM closed ORDER BY ALL"
        totals = f"SELECT k, total, epoch FROM '{life}/running/*.parquet' ORDER BY ALL"
        return [connection.execute(windows).fetchall(), connection.execute(totals).fetchall()]
