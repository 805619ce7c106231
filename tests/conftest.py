"""What tests share: storage of every kind, and one Spark."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from hypothesis import settings
from moto.server import ThreadedMotoServer

from arroyo_dagster.log import ObjectStorage, open_store
from arroyo_dagster.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Machines are shared: how long an example takes says nothing.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """obstore's options for a real S3 server on loopback that has a bucket named `bucket`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    yield {
        **keys,
        "endpoint": f"http://{host}:{port}",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
    }
    server.stop()


@pytest.fixture
def s3_store(s3_options: dict[str, Any]) -> ObjectStorage:
    return open_store(f"s3://bucket/state-{next(_prefixes)}", s3_options)


@pytest.fixture
def local_store(tmp_path: Path) -> ObjectStorage:
    return open_store(str(tmp_path / "state"))


@pytest.fixture
def memory_store() -> ObjectStorage:
    return open_store("memory://")


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """An embedded Spark with two cores, started once. Starting soon counts for more than running fast."""
    session = local_session(2, {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"})
    yield session
    session.stop()
