"""The Spark that runs are given."""

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from arroyo_dagster import SparkResource
from arroyo_dagster.errors import ConfigurationError


def test_without_a_word_it_is_the_one_of_the_process_and_lives_on_after_the_run(spark: SparkSession) -> None:
    seen: list[SparkSession] = []

    @dg.op
    def use(arroyo_spark: SparkResource) -> None:
        seen.extend([arroyo_spark.session(), arroyo_spark.session()])

    @dg.job(resource_defs={"arroyo_spark": SparkResource()})
    def job() -> None:
        use()

    assert job.execute_in_process().success
    assert seen == [spark, spark]
    assert spark.range(3).count() == 3


def test_of_a_master_and_a_remote_address_at_once_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a master or a remote address, not both"):
        SparkResource(master="local[2]", remote="sc://localhost:15002").session()


def test_a_server_is_not_asked_before_a_session_is_wanted() -> None:
    SparkResource(remote="sc://localhost:1/;token=secret")
