"""A pipeline as Dagster sees it: its assets, its partitions, and how to reach its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dagster as dg

from arroyo_dagster.dataflow import Pipeline
from arroyo_dagster.dataflow.graph import Graph, OperatorNode, SinkNode
from arroyo_dagster.dataflow.stages import Stage, cut
from arroyo_dagster.engine import Engine, embedded_session
from arroyo_dagster.errors import ArroyoDagsterError, StorageError
from arroyo_dagster.orchestration.resources import SPARK, SparkResource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE_TAG = "arroyo_dagster/pipeline"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A pipeline, where its state lies, and the spec of each of its assets by the name of its node."""

    pipeline: Pipeline
    graph: Graph
    state_url: str | None
    specs: Mapping[str, dg.AssetSpec]

    @property
    def name(self) -> str:
        """The pipeline's name, with which the names of all that belongs to it begin."""
        return self.pipeline.name

    @property
    def partitions(self) -> dg.DynamicPartitionsDefinition:
        """Epochs as partitions."""
        return partitions_of(self.pipeline)

    @property
    def handover(self) -> str:
        """The key of the IO manager for what ops give to each other."""
        return f"{self.name}_handover"

    @property
    def nodes(self) -> tuple[OperatorNode | SinkNode, ...]:
        """The nodes whose assets have epochs."""
        return (*self.graph.operators, *self.graph.sinks)

    @property
    def persisted(self) -> dict[str, dg.AssetSpec]:
        """The assets that have epochs, by the names of their nodes."""
        return {node.name: self.specs[node.name] for node in self.nodes}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The Spark jobs of an epoch, in their order."""
        return cut(self.graph)

    def engine(
        self, who: str, run_id: str | None = None, session: Callable[[], SparkSession] = embedded_session
    ) -> Engine:
        """The pipeline's engine. Its storage is opened, and made if it is a directory that does not exist."""
        return Engine(self.pipeline, session=session, state_url=self.state_url, who=who, run_id=run_id)

    def engine_of(self, context: dg.OpExecutionContext) -> Engine:
        """The engine of a run, which has a Spark if its op has asked for one."""

        def session() -> SparkSession:
            spark: SparkResource = getattr(context.resources, SPARK)
            return spark.session()

        return self.engine(f"run {context.run_id}", context.run_id, session)


def partitions_of(pipeline: Pipeline) -> dg.DynamicPartitionsDefinition:
    """Epochs as partitions."""
    return dg.DynamicPartitionsDefinition(name=f"{pipeline.name}_epochs")


def key_of(epoch: int) -> str:
    """The partition key of an epoch. Keys sort like the epochs do."""
    return f"{epoch:08d}"


def epoch_of(key: str) -> int | None:
    """The epoch that a partition key stands for, if it stands for one."""
    return int(key) if key.isascii() and key.isdigit() and key_of(int(key)) == key and int(key) > 0 else None


@contextmanager
def in_a_sentence() -> Iterator[None]:
    """Let a run fail with the sentence that tells why, and without a trace of how we found out."""
    try:
        yield
    except ArroyoDagsterError as error:
        raise refusal(str(error), again=isinstance(error, StorageError)) from None
    except dg.Failure as failure:
        raise refusal(failure.description or "", again=failure.allow_retries) from None


def refusal(reason: str, *, again: bool = False) -> dg.Failure:
    """What a run fails with that cannot do what it is for. `again` says that it may be worth another try."""
    return dg.Failure(reason, allow_retries=again)
