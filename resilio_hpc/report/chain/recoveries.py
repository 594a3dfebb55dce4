"""The faults of a run with what became of them: who recovered from it, and what was its cause. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import microseconds
from resilio_hpc.report.accounting.part_facts import PartFacts
from resilio_hpc.report.accounting.run_time import RunTime
from resilio_hpc.report.faults import RunFault, faults

KINDS = frozenset({
    "round", "launch", "stopping", "decision", "recovered", "verdict", "rank_failed", "node_lost", "agent_ended",
    "agent_left", "slow_start", "origin", "echoes", "successor", "requeued_instead",
    "rank_restarted", "drill",
})  # fmt: skip
_SIGNS = frozenset({"rank_failed", "node_lost", "agent_ended", "agent_left", "slow_start"})
MOST_LINES = 10_000  # looked at for one fault
_TOLD = frozenset({"origin", "echoes", "decision", "recovered", "rank_restarted"})


class RecoveryOutcome(str, Enum):
    """What became of a fault."""

    AUTOMATIC = "automatic"  # in the job, or by the next job of its chain
    BY_HAND = "by hand"  # in a job that its user submitted
    FAILED = "failed"
    UNDER_WAY = "under way"
    NOT_NEEDED = "not needed"  # a spare was lost


@dataclass(frozen=True)
class ChainRecovery:
    """A fault and what became of it. ``part``: the job in which it was; ``lines``: the ledger's.

    ``cause``: what the diagnosis says, "" where it says nothing; ``confidence``: 0 to 1, None where it is not judged;
    ``primary``: False where the diagnosis names no end as the primary cause; ``root``: the message of the first failed
    rank; ``echoes``: how many others ended because of it; ``down_s``: until training went on, None where it did not,
    or where ranks report no steps.
    """

    fault: RunFault
    outcome: RecoveryOutcome
    part: str
    cause: str
    confidence: float | None
    primary: bool
    failure_class: str
    place: str
    root: str
    echoes: int
    down_s: float | None
    lines: tuple[Event, ...]
    sign: Event | None = None  # the line of the end that was the first
    ends: int = 1  # ranks and nodes that ended in that moment, as far as the ledger says


def recoveries(events: Sequence[Event], time: RunTime, goes_on: bool) -> list[ChainRecovery]:
    """Return all faults, by time. ``events`` by time; ``goes_on``: the run has not ended."""
    found = [one for one in faults(events) if isfinite(one.time)]  # a wild line tells no moment
    story = [event for event in events if event.kind in _SIGNS | _TOLD]
    times = [event.time for event in story]
    parts = [part.facts for part in time.parts]
    followed = _followed(events, parts)
    told: list[ChainRecovery] = []
    for number, fault in enumerate(found):
        later = [one.time for one in found[number + 1 : number + 2]]
        until = max(later[0], fault.time) if later else float("inf")
        lines = _window(story, bisect_left(times, fault.time), until)
        told.append(_told(fault, lines, parts, followed, goes_on))
    return told


def _window(story: Sequence[Event], first: int, until: float) -> list[Event]:
    """Return the lines about a fault: until the next one, or its recovery."""
    found: list[Event] = []
    for number in range(first, len(story)):
        event = story[number]
        silent = Fields(event.fields).number("silent_s") or 0.0
        if event.time - silent > until and event.kind in _SIGNS:
            break
        found.append(event)
        if event.kind in ("recovered", "rank_restarted") or len(found) > MOST_LINES:
            break
    return found


def _told(
    fault: RunFault, lines: Sequence[Event], parts: Sequence[PartFacts], followed: dict[str, RecoveryOutcome],
    goes_on: bool,
) -> ChainRecovery:  # fmt: skip
    part = next((one for one in parts if one.began.us <= microseconds(fault.time) <= one.ended.us), None)
    key = part.key if part is not None else ""
    outcome, down_s = _outcome(fault, parts, key, followed, goes_on)
    # a verdict that comes before all ends are known tells of the origin under the next round's number
    origin = _first(lines, "origin", fault.round) or _first(lines, "origin", None)
    of = Fields(origin.fields if origin is not None else {})
    sign = _root(lines, fault, of)
    sure = of.number("confidence")
    root = Fields(sign.fields if sign is not None else {})
    echoes = _first(lines, "echoes", fault.round)
    others = (origin, echoes, _first(lines, "decision", None), _first(lines, "recovered", None))
    return ChainRecovery(
        fault=fault,
        outcome=outcome,
        part=key,
        cause=of.text("evidence"),
        confidence=min(1.0, max(0.0, sure)) if sure is not None else None,
        primary=of.data.get("primary") is True or origin is None,
        failure_class=root.text("class"),
        place=root.text("place"),
        root=(root.text("message").strip() or root.text("log")),
        echoes=max(0, Fields(echoes.fields).whole("count") or 0) if echoes is not None else 0,
        down_s=down_s,
        lines=tuple(event for event in (sign, *others) if event is not None),
        sign=sign,
        ends=max(of.whole("ends") or 0, len({_end_of(event) for event in lines if event.kind in _SIGNS}), 1),
    )


def _first(lines: Sequence[Event], kind: str, number: int | None) -> Event | None:
    for event in lines:
        if event.kind == kind and (number is None or Fields(event.fields).whole("round") in (number, None)):
            return event
    return None


def _end_of(event: Event) -> tuple[str, int | None]:
    f = Fields(event.fields)
    return f.text("node"), f.whole("rank")


def _root(lines: Sequence[Event], fault: RunFault, origin: Fields) -> Event | None:
    """Return the line of the end that was the first: of the rank or node that the diagnosis names, or the fault's."""
    signs = [event for event in lines if event.kind in _SIGNS]
    named = [(origin.text("node"), origin.whole("rank")), (fault.node, fault.rank)]
    for node, rank in named:
        for event in signs:
            f = Fields(event.fields)
            same = rank is not None and rank >= 0 and f.whole("rank") == rank
            if node and f.text("node") == node and (same or rank is None or rank < 0):
                return event
    return signs[0] if signs else None


def _outcome(
    fault: RunFault, parts: Sequence[PartFacts], key: str, followed: dict[str, RecoveryOutcome], goes_on: bool
) -> tuple[RecoveryOutcome, float | None]:
    if fault.kind == "spare_lost":
        return RecoveryOutcome.NOT_NEEDED, None
    if fault.recovered:
        return RecoveryOutcome.AUTOMATIC, fault.recovery_s
    at = microseconds(fault.time)
    for part in parts:
        first = next((one.first for one in part.rounds if one.first is not None and one.first.us > at), None)
        if first is not None:
            down_s = (first.us - at) / 1e6
            return (RecoveryOutcome.AUTOMATIC if part.key == key else followed[part.key]), down_s
    return (RecoveryOutcome.UNDER_WAY if goes_on else RecoveryOutcome.FAILED), None


def _followed(events: Sequence[Event], parts: Sequence[PartFacts]) -> dict[str, RecoveryOutcome]:
    """Return for each part whether the run, or Slurm, began it, or its user did."""
    submitted = {
        Fields(event.fields).text("job") for event in events
        if event.kind == "successor" and event.fields.get("acted", True) is not False
    }  # fmt: skip
    seen: set[str] = set()
    found: dict[str, RecoveryOutcome] = {}
    for part in parts:
        requeued = part.job in seen and part.key.partition("r")[0] == part.job and "." not in part.key
        by_itself = bool(part.job) and (part.job in submitted or requeued)
        found[part.key] = RecoveryOutcome.AUTOMATIC if by_itself else RecoveryOutcome.BY_HAND
        seen.add(part.job)
    return found
