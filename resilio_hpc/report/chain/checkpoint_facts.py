"""What the ledger says of a run's checkpoints: how often, how long, on which tiers, how fast, from where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.run_time import RunTime

TIERS = {
    "local": "the nodes' own disks",
    "copied": "copies in other nodes' memory",
    "fetched": "snapshots fetched from other nodes",
}
PROBLEMS = {
    "persist_failed": "could not be written",
    "local_failed": "no copy on the node's own disk",
    "copy_failed": "no copy in another node's memory",
    "save_overdue": "was far too long on its way to disk",
    "space_short": "room for checkpoints ran short",
}
SOURCES = ("memory", "local", "peer", "committed")
MOST_BYTES = 1e18
MOST_S = 1e8  # what is longer is no time of a checkpoint
KINDS = frozenset({"committed", "first_step", "recovered", *TIERS, *PROBLEMS})


@dataclass(frozen=True)
class Spread:
    """Measured values: how many, the middle one, the largest, and their sum."""

    count: int
    median: float
    most: float
    total: float


@dataclass(frozen=True)
class TierSpeed:
    """What went to a tier, or came from it. ``bytes_per_s``: of the middle transfer of a node, None where not known."""

    tier: str
    transfers: int
    size_bytes: float
    seconds: Spread
    bytes_per_s: float | None


@dataclass(frozen=True)
class CheckpointFacts:
    """A run's checkpoints.

    ``interval_s``: between commits of a round; ``blocked_s``: for how long training waited for a snapshot;
    ``commit_s``: of the commit itself; ``restores``: seconds of the slowest rank, by the furthest source of a restore;
    ``steps_back``: the newest committed step less the one restored, where that is older; ``lost_steps``: of recoveries.
    """

    committed: int
    not_timed: int
    interval_s: Spread | None
    blocked_s: Spread | None
    commit_s: Spread | None
    tiers: tuple[TierSpeed, ...]
    restores: dict[str, Spread]
    steps_back: Spread | None
    lost_steps: Spread | None
    problems: dict[str, int]
    steps: tuple[tuple[float, int], ...]


def checkpoint_facts(events: Sequence[Event], time: RunTime) -> CheckpointFacts:
    """Return the facts. ``events`` by time."""
    of_kind: dict[str, list[Event]] = {}
    for event in events:
        if event.kind in KINDS:
            of_kind.setdefault(event.kind, []).append(event)
    commits = of_kind.get("committed", [])
    blocked = _numbers(commits, "blocked_s")
    tiers = [speed for tier in TIERS if (speed := _speed(tier, of_kind.get(tier, [])))]
    return CheckpointFacts(
        committed=len(commits),
        not_timed=len(commits) - len(blocked),
        interval_s=_spread(_intervals(time)),
        blocked_s=_spread(blocked),
        commit_s=_spread(_numbers(commits, "seconds")),
        tiers=tuple(tiers),
        restores=_restores(of_kind.get("first_step", [])),
        steps_back=_spread(_steps_back(events)),
        lost_steps=_spread(_numbers(of_kind.get("recovered", []), "lost_steps")),
        problems=dict(Counter(event.kind for event in events if event.kind in PROBLEMS)),
        steps=tuple(_steps(events)),
    )


def _spread(values: Iterable[float]) -> Spread | None:
    found = list(values)
    return Spread(len(found), median(found), max(found), sum(found)) if found else None


def _numbers(events: Iterable[Event], name: str) -> list[float]:
    found = (Fields(event.fields).number(name) for event in events)
    return [value for value in found if value is not None and 0 <= value <= MOST_S]


def _intervals(time: RunTime) -> list[float]:
    """Return the times between commits of one round, of steps that it made itself."""
    found: list[float] = []
    for part in time.parts:
        for one in part.facts.rounds:
            own = [commit for commit in one.commits if one.first is not None and commit.at.us >= one.first.us]
            found += [(later.at.us - before.at.us) / 1e6 for before, later in pairwise(own) if later.step > before.step]
    return found


def _speed(tier: str, events: Sequence[Event]) -> TierSpeed | None:
    sizes, times, speeds = 0.0, [], []
    for event in events:
        f = Fields(event.fields)
        size, took = f.number("size_bytes"), f.number("seconds")
        if size is None or took is None or not 0 <= size < MOST_BYTES or not 0 <= took <= MOST_S:
            continue
        sizes += size
        times.append(took)
        if took > 0 and size > 0:
            speeds.append(size / took)
    spread = _spread(times)
    return TierSpeed(tier, len(times), sizes, spread, median(speeds) if speeds else None) if spread else None


def _restores(firsts: Iterable[Event]) -> dict[str, Spread]:
    times: dict[str, list[float]] = {}
    for event in firsts:
        f = Fields(event.fields)
        took = f.number("restore_s")
        if (f.whole("restored") or 0) >= 0 and f.text("source") in SOURCES and took is not None and 0 <= took <= MOST_S:
            times.setdefault(f.text("source"), []).append(took)
    return {source: spread for source in SOURCES if (spread := _spread(times.get(source, [])))}


def _steps_back(events: Iterable[Event]) -> Iterable[float]:
    newest = -1
    for event in events:
        f = Fields(event.fields)
        step = f.whole("step" if event.kind == "committed" else "restored")
        if event.kind == "committed" and step is not None:
            newest = max(newest, step)
        elif event.kind == "first_step" and step is not None and step >= 0:
            yield max(0, newest - step)


def _steps(events: Iterable[Event]) -> Iterable[tuple[float, int]]:
    """Return (Unix seconds, step) wherever the ledger tells how far training is."""
    for event in events:
        f = Fields(event.fields)
        step = f.whole("step")
        if event.kind == "first_step" and step is not None:
            yield event.time, max(0, f.whole("restored") or 0)
            yield event.time, step
        elif event.kind == "committed" and step is not None:
            yield event.time, step
