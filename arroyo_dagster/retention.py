"""Decide what cleaning would remove. Pure: everything is classified before anything is deleted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pendulum import DateTime, Duration

from arroyo_dagster.errors import ConfigurationError, DamagedObjectError
from arroyo_dagster.log import PipelineState, names
from arroyo_dagster.log.entries import CleanupStarted
from arroyo_dagster.model import EpochSet, FileEntry, Manifest, ObjectPath


@dataclass(frozen=True, slots=True)
class Retention:
    """Which epochs to keep: those that any of the rules keeps.

    `keep_last`: the newest ones. `keep_within`: those taken within so long. `hourly`, `daily`: the newest one of
    each of the latest so many hours or days, in UTC, that have any.
    """

    keep_last: int | None = None
    keep_within: Duration | None = None
    hourly: int | None = None
    daily: int | None = None

    def __post_init__(self) -> None:
        counts = {"keep_last": self.keep_last, "hourly": self.hourly, "daily": self.daily}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigurationError(f"a retention's {name} must be 1 or more, not {count}; leave it out for none")
        if self.keep_within is not None and self.keep_within.total_seconds() <= 0:
            raise ConfigurationError("a retention's keep_within must be more than zero; leave it out for none")
        if self.keep_within is None and not any(counts.values()):
            raise ConfigurationError("a retention needs at least one rule, keep_last=20 for example")


@dataclass(frozen=True, slots=True)
class CleanupPlan:
    """What a cleaning would do: `removes` go, and with them `files`, and then `manifests`, oldest first.

    `kept` tells of every epoch that stays why it does. The plan holds for the log as it was at entry `planned_at`.
    """

    planned_at: int
    min_epoch: int
    kept: Mapping[int, tuple[str, ...]]
    removes: EpochSet
    files: tuple[FileEntry, ...]
    manifests: tuple[ObjectPath, ...]

    @property
    def bytes(self) -> int:
        """The size of the files that would go."""
        return sum(file.bytes for file in self.files)

    def started(self, run_id: str | None = None) -> CleanupStarted:
        """The fact that puts this plan into force."""
        return CleanupStarted(self.planned_at, self.min_epoch, self.removes, len(self.files), self.bytes, run_id)


def plan_cleanup(state: PipelineState, manifests: Iterable[Manifest], policy: Retention, now: DateTime) -> CleanupPlan:
    """Plan a cleaning.

    `manifests` are all that lie on storage, those of removed epochs and of dead attempts among them. No file
    is in the plan that a kept manifest names, that an attempt at the next epoch has written, or that a compaction has
    made for it.
    """
    found = {(manifest.epoch, manifest.attempt): manifest for manifest in manifests}
    reasons: dict[int, list[str]] = defaultdict(list)
    for epoch, reason in _by_rule(state, found, policy, now):
        reasons[epoch].append(reason)
    oldest = min(reasons, default=state.head)
    for epoch, reason in _by_need(state):
        reasons[epoch].append(reason)
    for epoch in EpochSet.of(reasons) & state.live:
        if (parent := state.parent_of(epoch)) in state.kept:
            reasons[parent].append(f"the replay of epoch {epoch} starts from it")

    stays = {(epoch, state.attempt_of(epoch)) for epoch in reasons}
    if lost := sorted(stays - found.keys()):
        raise DamagedObjectError(
            f"{names.manifest(*lost[0])}, the manifest of epoch {lost[0][0]}, is lost, so that nobody knows what the "
            "epoch needs: restore it before cleaning"
        )
    if state.plan is not None:  # an attempt is in flight, or one may yet go on with what a dead one has made
        stays |= {key for key in found if key[0] == state.next_epoch}
    named = {file.path for key in stays & found.keys() for file in found[key].files}
    named |= {file.path for compaction in state.compactions for file in compaction.by}
    goes = sorted(found.keys() - stays)
    files = {file.path: file for key in goes for file in found[key].files if file.path not in named}
    return CleanupPlan(
        planned_at=state.sequence,
        min_epoch=max(state.min_epoch, oldest),
        kept={epoch: tuple(reasons[epoch]) for epoch in sorted(reasons)},
        removes=state.kept - EpochSet.of(reasons),
        files=tuple(files[path] for path in sorted(files)),
        manifests=tuple(names.manifest(*key) for key in goes),
    )


def _by_rule(
    state: PipelineState, found: Mapping[tuple[int, int], Manifest], policy: Retention, now: DateTime
) -> Iterator[tuple[int, str]]:
    newest_first = sorted(state.live, reverse=True)
    for epoch in newest_first[: policy.keep_last or 0]:
        yield epoch, f"among the last {policy.keep_last}"
    taken = {
        epoch: manifest.barrier.timestamp.in_timezone("UTC")
        for epoch in newest_first
        if (manifest := found.get((epoch, state.attempt_of(epoch))))
    }
    for epoch, time in taken.items():
        if policy.keep_within is not None and now - time <= policy.keep_within:
            yield epoch, f"taken within {policy.keep_within.in_words()}"
    for count, form in ((policy.hourly, "[the hour] YYYY-MM-DD HH:00"), (policy.daily, "[the day] YYYY-MM-DD")):
        if count is None:
            continue
        newest_of: dict[str, int] = {}
        for epoch, time in taken.items():
            newest_of.setdefault(time.format(form), epoch)
        for period in sorted(newest_of, reverse=True)[:count]:
            yield newest_of[period], f"the newest of {period}"


def _by_need(state: PipelineState) -> Iterator[tuple[int, str]]:
    if state.head:
        yield state.head, "the head"
    for epoch, label in state.pins.items():
        yield epoch, f"pinned as {label!r}"
    for epoch in state.needed_by_sinks:
        yield epoch, "needed by sinks"
