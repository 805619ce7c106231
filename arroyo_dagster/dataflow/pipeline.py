"""Pipelines: the named whole of sources, operators and sinks, with a policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arroyo_dagster.controller import CheckpointPolicy
from arroyo_dagster.dataflow.duration import DurationLike, microseconds, parse_duration
from arroyo_dagster.dataflow.graph import EventTime, Expression, Fields, Graph, OperatorNode, SinkNode, SourceNode
from arroyo_dagster.dataflow.sink import Sink
from arroyo_dagster.dataflow.source import Source
from arroyo_dagster.dataflow.stages import cut
from arroyo_dagster.dataflow.stream import Stream, check_time, fields_of
from arroyo_dagster.errors import ConfigurationError
from arroyo_dagster.log import names
from arroyo_dagster.retention import Retention

KEY_GROUPS = 128
CLEANUP_SCHEDULE = "*/10 * * * *"
_NODE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


class Pipeline:
    """A dataflow with a name, and how to run it.

    `checkpoint_interval` is short for a `policy` with that interval. What `retention` does not keep is removed
    when `cleanup_schedule` says so, in cron's words. `parallelism` is the number of subtasks of a
    keyed operator, by default the number of cores that Spark has here; it may change between epochs. `key_groups`
    bounds it, and is fixed with the first epoch. State lies below `state_url`, by default `.arroyo` in the
    working directory, or what the environment's ARROYO_STATE_URL says.
    """

    def __init__(
        self,
        name: str,
        *,
        checkpoint_interval: DurationLike | None = None,
        policy: CheckpointPolicy | None = None,
        retention: Retention | None = None,
        cleanup_schedule: str = CLEANUP_SCHEDULE,
        parallelism: int | None = None,
        key_groups: int = KEY_GROUPS,
        state_url: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin with no sources."""
        if not isinstance(name, str):
            raise ConfigurationError(f"the name of a pipeline must be a text, not {name!r}")
        names.pipeline(name)
        if not isinstance(key_groups, int) or not 1 <= key_groups <= 1 << 16:
            raise ConfigurationError(
                f"pipeline {name!r}: its key_groups must lie between 1 and 65536, not at {key_groups}"
            )
        if parallelism is not None and not (isinstance(parallelism, int) and 1 <= parallelism <= key_groups):
            raise ConfigurationError(
                f"pipeline {name!r}: its parallelism must lie between 1 and its {key_groups} key groups, "
                f"not at {parallelism}"
            )
        self.name = name
        self.policy = policy or CheckpointPolicy()
        if checkpoint_interval is not None:
            interval = parse_duration(checkpoint_interval, f"pipeline {name!r}: its checkpoint_interval")
            self.policy = replace(self.policy, interval=interval)
        self.retention = retention or Retention(keep_last=20)
        self.cleanup_schedule = cleanup_schedule
        self.parallelism = parallelism
        self.key_groups = key_groups
        self.state_url = state_url
        self.storage_options = dict(storage_options or {})
        self._sources: list[SourceNode] = []
        self._operators: list[OperatorNode] = []
        self._sinks: list[SinkNode] = []

    def source(
        self,
        name: str,
        source: Source,
        *,
        event_time: str | None = None,
        watermark_delay: DurationLike = "0 seconds",
        idle_after: DurationLike = "1 minute",
    ) -> Stream:
        """Read a source.

        `event_time` is the column that tells when a row happened; the watermark follows the latest one, by
        `watermark_delay`. A source without rows for longer than `idle_after` no longer holds the
        watermark of operators back that have other inputs.
        """
        self._claim(name, "source")
        if not isinstance(source, Source):
            raise ConfigurationError(f"source {name!r} must be a Source such as FileSource, not {source!r}")
        delay = microseconds(watermark_delay, f"source {name!r}: its watermark_delay")
        idle = microseconds(idle_after, f"source {name!r}: its idle_after")
        if delay < 0 or idle < 0:
            raise ConfigurationError(f"source {name!r}: its watermark_delay and idle_after must be zero or more")
        fields = None if source.schema is None else fields_of(source.schema)
        if event_time is not None:
            check_time(fields, event_time, f"source {name!r}")
        time = None if event_time is None else EventTime(event_time)
        node = SourceNode(name, source, time, delay, idle)
        self._sources.append(node)
        return Stream(self, node, fields, time)

    def graph(self) -> Graph:
        """Everything declared so far, once it is whole: every source and every operator must lead to a sink."""
        graph = Graph(tuple(self._sources), tuple(self._operators), tuple(self._sinks))
        if not graph.sources:
            raise ConfigurationError(f"pipeline {self.name!r} has no source")
        stages = cut(graph)
        read = {leg.origin for stage in stages for leg in stage.legs}
        read |= {stage.name for stage in stages if stage.outlets}
        nodes: list[SourceNode | OperatorNode] = [*graph.sources, *graph.operators]
        for node in nodes:
            if node.name not in read:
                kind = "source" if isinstance(node, SourceNode) else "operator"
                raise ConfigurationError(
                    f"pipeline {self.name!r}: the {kind} {node.name!r} leads nowhere; "
                    "give its stream a sink, or take it out"
                )
        return graph

    def declare_operator(self, node: OperatorNode) -> OperatorNode:
        """Add an operator; streams call this."""
        self._claim(node.name, "operator")
        self._operators.append(node)
        return node

    def declare_sink(self, name: str, sink: Sink, stream: Expression | None, fields: Fields | None) -> None:
        """Add a sink; streams call this."""
        self._claim(name, "sink")
        if not isinstance(sink, Sink):
            raise ConfigurationError(f"sink {name!r} must be a Sink such as DeltaSink, not {sink!r}")
        self._sinks.append(SinkNode(name, sink, stream, fields))

    def _claim(self, name: str, kind: str) -> None:
        if not isinstance(name, str) or not _NODE.fullmatch(name):
            raise ConfigurationError(
                f"pipeline {self.name!r}: the {kind} name {name!r} is not usable: take up to 100 ASCII letters, digits "
                "and underscores, and begin with a letter"
            )
        taken = {node.name for nodes in (self._sources, self._operators, self._sinks) for node in nodes}
        if name in taken:
            raise ConfigurationError(f"pipeline {self.name!r}: the name {name!r} is taken; give the {kind} another")
