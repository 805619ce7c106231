"""How nodes look as assets."""

from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

from arroyo_dagster import AssetNode, Pipeline, Translator, agg, build_definitions
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.orchestration.deployment import partitions_of
from arroyo_dagster.orchestration.translator import specs_of
from arroyo_dagster.sinks import DeltaSink, ParquetSink
from arroyo_dagster.sources import FileSource
from arroyo_dagster.testing import TableSource
from tests.engine.operators import Forget, Recorder
from tests.orchestration.helpers import ASSETS, CUTS, ROWS, TOTALS, pipeline_in


def identity(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def lineage(specs: dict[str, dg.AssetSpec]) -> dict[str, set[str]]:
    return {name: {dep.asset_key.path[-1] for dep in spec.deps} for name, spec in specs.items()}


def columns(spec: dg.AssetSpec) -> dict[str, str]:
    schema = spec.metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchema)
    return {column.name: column.type for column in schema.columns}


def files(tmp_path: Path, name: str) -> ParquetSink:
    return ParquetSink(str(tmp_path / name))


class TestLineage:
    def test_is_the_dataflow(self, tmp_path: Path) -> None:
        assert lineage(specs_of(pipeline_in(tmp_path), Translator())) == {
            "rows": set(),
            "totals": {"rows"},
            "stats": {"rows"},
            "running": {"totals"},
            "stats_late": {"stats"},
            "windows": {"stats"},
            "raw": {"rows"},
        }

    def test_goes_through_steps_unions_and_second_inputs(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        one = pipeline.source("one", TableSource(ROWS, CUTS), event_time="t")
        two = pipeline.source("two", TableSource(ROWS, CUTS), event_time="t")
        three = pipeline.source("three", TableSource(ROWS, CUTS), event_time="t")
        seen = one.where("v > 3").union(three).process("seen", Forget(), two.map_batches(identity), schema=TOTALS)
        seen.union(seen.where("total > 1")).sink("doubled", files(tmp_path, "doubled"))
        seen.map_batches(identity).sink("mapped", files(tmp_path, "mapped"))
        two.sink("copied", files(tmp_path, "copied"))
        specs = specs_of(pipeline, Translator())
        assert lineage(specs) == {
            "one": set(),
            "two": set(),
            "three": set(),
            "seen": {"one", "two", "three"},
            "doubled": {"seen"},
            "mapped": {"seen"},
            "copied": {"two"},
        }
        assert len(list(specs["doubled"].deps)) == 1

    def test_in_dagsters_graph_is_the_same(self, tmp_path: Path) -> None:
        graph = build_definitions([pipeline_in(tmp_path)]).resolve_asset_graph()
        windows = graph.get(dg.AssetKey(["p", "windows"]))
        assert windows.parent_keys == {dg.AssetKey(["p", "stats"])}
        assert graph.get(dg.AssetKey(["p", "rows"])).is_external
        assert not windows.is_external
        assert windows.partitions_def == dg.DynamicPartitionsDefinition(name="p_epochs")
        assert graph.get(dg.AssetKey(["p", "rows"])).partitions_def is None
        assert windows.group_name == graph.get(dg.AssetKey(["p", "rows"])).group_name == "p"


class TestSpec:
    def test_tells_the_kind_of_storage_and_where_it_is(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        pipeline.source("rows", FileSource(str(tmp_path / "in"), format="parquet")).process("seen", Forget()).sink(
            "table", DeltaSink(str(tmp_path / "table"))
        ).sink("files", files(tmp_path, "files"))
        specs = specs_of(pipeline, Translator())
        assert {name: spec.kinds for name, spec in specs.items()} == {
            "rows": {"parquet"},
            "seen": {"pyspark"},
            "table": {"deltalake"},
            "files": {"parquet"},
        }
        assert str(tmp_path / "table") in specs["table"].metadata["dagster/uri"]
        assert str(tmp_path / "in") in specs["rows"].metadata["dagster/uri"]
        assert "dagster/uri" not in specs["seen"].metadata

    def test_describes_windows_with_their_keys_and_aggregates(self, tmp_path: Path) -> None:
        description = str(specs_of(pipeline_in(tmp_path), Translator())["stats"].description)
        assert "`n` = count(), `top` = max(v), by `k`, in windows of 10 seconds of `t`" in description
        assert "Takes `rows`, by `k`." in description

    def test_describes_what_comes_late(self, tmp_path: Path) -> None:
        description = str(specs_of(pipeline_in(tmp_path), Translator())["stats_late"].description)
        assert "Takes rows that came too late for their window." in description

    def test_describes_every_step_on_the_way(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        stream = pipeline.source("rows", TableSource(ROWS, CUTS), event_time="t", watermark_delay="1 minute")
        stepped = stream.where("v > 3").select("k", "v AS w").with_columns(x="w * 2").sql("SELECT  *\n FROM rows")
        stepped.map_batches(identity).union(stream).sink("out", files(tmp_path, "out"))
        specs = specs_of(pipeline, Translator())
        assert (
            "Takes (`rows` where `v > 3` select `k, v AS w` with `x = w * 2` by `SELECT * FROM rows` "
            "through `identity` and `rows`)."
        ) in str(specs["out"].description)
        assert "Event time is `t`, up to 1 minute late." in str(specs["rows"].description)

    def test_describes_the_state_of_operators_of_ones_own(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        stream = pipeline.source("rows", TableSource(ROWS, CUTS), event_time="t")
        stream.process("notes", Recorder(str(tmp_path))).sink("out", files(tmp_path, "out"))
        spec = specs_of(pipeline, Translator())["notes"]
        description = str(spec.description)
        assert description.startswith("Writes down every call of its methods")
        assert "* `times`, rows by time `t`, kept for" in description
        assert "* `notes`, seen whole by every subtask, one row for each name: name, value" in description
        assert columns(spec) == {
            "times.k": "string",
            "times.t": "timestamp[us]",
            "notes.name": "string",
            "notes.value": "int64",
        }

    def test_has_the_columns_of_sources_states_and_sinks(self, tmp_path: Path) -> None:
        specs = specs_of(pipeline_in(tmp_path), Translator())
        row = {"k": "string", "v": "int64", "t": "timestamp[us, tz=UTC]"}
        assert columns(specs["rows"]) == columns(specs["raw"]) == columns(specs["stats_late"]) == row
        assert columns(specs["totals"]) == {"k": "string", "total": "int64"}  # one table, so its name is left out
        assert columns(specs["running"]) == {"k": "string", "total": "int64", "epoch": "int64"}
        assert list(columns(specs["windows"])) == ["k", "window_start", "window_end", "n", "top"]

    def test_says_which_types_only_spark_will_know(self, tmp_path: Path) -> None:
        pipeline = Pipeline("p", state_url=str(tmp_path))
        stream = pipeline.source("rows", TableSource(ROWS, CUTS))
        stream.select("k", "v * 2 AS w").sink("out", files(tmp_path, "out"))
        stream.sql("SELECT * FROM rows").sink("all", files(tmp_path, "all"))
        specs = specs_of(pipeline, Translator())
        assert columns(specs["out"]) == {"k": "string", "w": "unknown"}
        assert "dagster/column_schema" not in specs["all"].metadata


class Renaming(Translator):
    """Another prefix for everything, owners for sinks."""

    def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
        spec = super().get_asset_spec(node)
        spec = spec.replace_attributes(key=spec.key.with_prefix("lake"), group_name="streams")
        return spec.merge_attributes(owners=["team:lake"]) if spec.key.path[-1] == "windows" else spec


class TestTranslator:
    def test_may_change_keys_groups_and_owners_and_the_lineage_follows(self, tmp_path: Path) -> None:
        definitions = build_definitions([pipeline_in(tmp_path)], translator=Renaming())
        dg.Definitions.validate_loadable(definitions)
        graph = definitions.resolve_asset_graph()
        prefix = ["lake", "p"]
        assert {key.path[:2] == prefix for key in graph.get_all_asset_keys()} == {True}
        windows = graph.get(dg.AssetKey([*prefix, "windows"]))
        assert windows.parent_keys == {dg.AssetKey([*prefix, "stats"])}
        assert windows.owners == ["team:lake"]
        assert windows.group_name == "streams"
        assert {check.asset_key for check in graph.asset_check_keys} <= set(graph.get_all_asset_keys())

    def test_must_leave_the_partitions(self, tmp_path: Path) -> None:
        class Careless(Translator):
            def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
                return super().get_asset_spec(node).replace_attributes(partitions_def=None)

        with pytest.raises(ConfigurationError, match="took away the partitions of 'totals', which are its epochs"):
            specs_of(pipeline_in(tmp_path), Careless())

    def test_sees_every_node_with_the_keys_that_it_reads(self, tmp_path: Path) -> None:
        seen: dict[str, tuple[dg.AssetKey, ...]] = {}

        class Watching(Translator):
            def get_asset_spec(self, node: AssetNode) -> dg.AssetSpec:
                seen[node.node.name] = node.deps
                return super().get_asset_spec(node)

        pipeline = pipeline_in(tmp_path)
        specs_of(pipeline, Watching())
        assert set(seen) == {"rows", *ASSETS}
        assert seen["windows"] == (dg.AssetKey(["p", "stats"]),)
        assert partitions_of(pipeline).name == "p_epochs"


def test_windows_without_aggregates_of_columns_are_described_too(tmp_path: Path) -> None:
    pipeline = Pipeline("p", state_url=str(tmp_path))
    stream = pipeline.source("rows", TableSource(ROWS, CUTS), event_time="t")
    stream.key_by("k", "v").tumble("1 day").aggregate("daily", n=agg.count()).sink("out", files(tmp_path, "out"))
    description = str(specs_of(pipeline, Translator())["daily"].description)
    assert description.startswith("`n` = count(), by `k`, `v`, in windows of 1 day of `t`.")
