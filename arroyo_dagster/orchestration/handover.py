"""What a checkpoint run's ops give to each other: small values, kept beside the pipeline's state.

So a run that failed can be gone on with from another machine, and nothing is ever unpickled. Rows never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.errors import StorageError
from arroyo_dagster.log import Creation, Store, names
from arroyo_dagster.log.codec import decode, encode
from arroyo_dagster.log.documents import pack, unpack
from arroyo_dagster.orchestration.deployment import Deployment, in_a_sentence, refusal
from arroyo_dagster.spark.plans import Attempt
from arroyo_dagster.spark.reports import StageReport

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Attempt, StageReport)}


class HandoverIOManager(dg.IOManager):
    """Stores values as JSON, by the run and the step that they come from."""

    def __init__(self, deployment: Deployment) -> None:
        """Serve one pipeline."""
        self._deployment = deployment

    def handle_output(self, context: dg.OutputContext, obj: Sequence[Attempt] | Sequence[StageReport]) -> None:
        """Keep values. If the step is tried again in the same run, the later ones count."""
        path = names.handover(context.run_id, context.step_key)
        data = pack({"kind": type(obj[0]).__name__, "values": [*map(encode, obj)]})
        with in_a_sentence():
            store = self._deployment.engine("handover").store
            if store.create(path, data) is Creation.TAKEN:
                store.delete(path)
                store.create(path, data)

    def load_input(self, context: dg.InputContext) -> list[Any]:
        """Find values, of this run or of the one that this one goes on with."""
        upstream = context.upstream_output
        assert upstream is not None
        path = names.handover(upstream.run_id, upstream.step_key)
        with in_a_sentence():
            store = self._deployment.engine("handover").store
            [data] = store.read([path])
            if data is None:
                raise refusal(
                    f"there is nothing from {upstream.step_key} of run {upstream.run_id[:8]}, because its epoch was "
                    "completed meanwhile or the pipeline has changed: launch the job anew"
                )
            where = f"{store.url}/{path}"
            document: dict[str, Any] = unpack(data, where)
            return [decode(_KINDS[document["kind"]], value, where) for value in document["values"]]


def clear(store: Store, run: dg.DagsterRun) -> list[str]:
    """Delete what a run's ops, and those of the runs that it went on with, have left; tell what could not be."""
    left = []
    for run_id in {run.run_id, run.parent_run_id or run.run_id, run.root_run_id or run.run_id}:
        try:
            for path in store.names(names.handovers(run_id)):
                store.delete(path)
        except StorageError as error:
            left.append(str(error))
    return left
