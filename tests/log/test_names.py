import pytest

from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import names


def test_names_sort_as_their_numbers_do() -> None:
    assert names.log_entry(9) < names.log_entry(10) < names.log_entry(10**15)
    assert names.manifest(9, 1) < names.manifest(10, 1)


def test_a_snapshot_is_known_by_its_name() -> None:
    assert names.snapshot_sequence(names.snapshot(42)) == 42
    for other in ("snapshots/42.json", "snapshots/x.json", names.log_entry(42), f"{names.snapshot(42)}.tmp"):
        assert names.snapshot_sequence(other) is None


def test_a_manifest_lies_below_its_attempt() -> None:
    assert names.manifest(3, 2) == f"{names.attempt(3, 2)}/manifest.json"


@pytest.mark.parametrize("name", ["auctions", "Hot_auctions_2", "a" * 100])
def test_a_pipeline_has_a_prefix_of_its_own(name: str) -> None:
    assert names.pipeline(name) == name


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "1st", "_x", "größe", "a" * 101, "a\n", "a-b", "a.b"])
def test_a_name_that_is_no_use_to_dagster_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not usable: take up to 100 ASCII letters"):
        names.pipeline(name)
