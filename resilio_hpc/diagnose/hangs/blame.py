"""Which rank the others wait for.

Per communicator: the ranks that have not entered the call in which others wait, and calls that do not agree. Across
communicators: a rank that is absent from one may itself wait in another, so the walk along who waits for whom ends at
the ranks that wait for no other. A walk that comes back to its start is a deadlock.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from resilio_hpc.diagnose.hangs.calls import CollectiveCall, RankCalls
from resilio_hpc.events.phrases import names


class HangKind(enum.Enum):
    """What a hang is."""

    ABSENT = "absent"
    """A rank has not entered a call in which others wait: it computes, is stopped, or is dead."""
    MISMATCH = "mismatch"
    """Ranks entered calls that do not agree."""
    DEADLOCK = "deadlock"
    """Ranks wait for each other in several communicators."""
    STUCK = "stuck"
    """All ranks have entered the same call, and none has completed it: network or kernel."""
    LAGGING = "lagging"
    """All ranks have entered the same call, and some have completed it."""
    NONE = "none"
    """No rank waits."""


class HangBlame(msgspec.Struct, frozen=True):
    """Who holds up a hang. ``ranks``: those to look at; ``waiting``: those that wait for them, directly or not."""

    kind: HangKind
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    communicator: str = ""
    call: CollectiveCall | None = None
    evidence: str = ""


def blame(ranks: Sequence[RankCalls], members: Mapping[str, Sequence[int]]) -> HangBlame:
    """Return who holds up the others. ``members``: all ranks of each communicator, also those that called nothing."""
    known = {one.rank: one for one in ranks}
    if differing := _mismatch(known, members):
        return differing
    entered = {(one.rank, communicator): one.entered(communicator) for one in ranks for communicator in one.calls}
    edges = {rank: _waits_for(one, known, members, entered) for rank, one in known.items()}
    edges = {rank: found for rank, found in edges.items() if found}
    if edges:
        return _end_of_the_walk(edges, known)
    return _all_entered(known, members)


Edge = tuple[int, str, CollectiveCall]
"""The rank that is waited for, and where."""


def _waits_for(
    one: RankCalls,
    known: Mapping[int, RankCalls],
    members: Mapping[str, Sequence[int]],
    entered: Mapping[tuple[int, str], int],
) -> list[Edge]:
    """Return the ranks that keep a rank in the calls that it has not completed."""
    found: list[Edge] = []
    for communicator, call in one.waits_in():
        if call.peer >= 0:
            if not _is_met(one.rank, call, communicator, known.get(call.peer)):
                found.append((call.peer, communicator, call))
            continue
        for rank in members.get(communicator, ()):
            if rank != one.rank and entered.get((rank, communicator), 0) < call.sequence:
                found.append((rank, communicator, call))
    return found


def _is_met(rank: int, call: CollectiveCall, communicator: str, other: RankCalls | None) -> bool:
    """Return whether the peer of a send or receive is inside the other half of it: earlier ones are completed."""
    if other is None:
        return False
    theirs = other.calls.get(communicator, [])
    return any(found.peer == rank and found.op != call.op and not found.completed for found in theirs)


def _end_of_the_walk(edges: Mapping[int, Sequence[Edge]], known: Mapping[int, RankCalls]) -> HangBlame:
    """Follow who waits for whom to the ranks that wait for no other, or around a circle."""
    ends: dict[int, tuple[str, CollectiveCall]] = {}
    for target, communicator, call in (edge for rank in sorted(edges) for edge in edges[rank]):
        if target not in ends or (call.place and not ends[target][1].place):
            ends[target] = (communicator, call)
    roots = sorted(rank for rank in ends if rank not in edges)
    # one that is inside a call, too, waits there for a rank of which nothing is known
    roots = [rank for rank in roots if rank not in known or not known[rank].waits_in()] or roots
    if roots:
        communicator, call = ends[roots[0]]
        silent = [rank for rank in roots if rank not in known]
        said = f"{names_of(roots)} did not enter {call.op} number {call.sequence} of {communicator}"
        said += f", in which others wait at {call.place}" if call.place else ""
        if silent:
            said += f"; nothing is known of {names_of(silent)}"
        return HangBlame(HangKind.ABSENT, tuple(roots), tuple(sorted(edges)), communicator, call, said)
    circle = _circle(edges)
    ranks, (_, communicator, call) = tuple(sorted(circle)), next(iter(circle.values()))
    steps = ", ".join(f"rank {rank} in {name} for rank {target}" for rank, (target, name, _) in circle.items())
    said = f"they wait in a circle: {steps}"
    return HangBlame(HangKind.DEADLOCK, ranks, tuple(sorted(edges)), communicator, call, said)


def _circle(edges: Mapping[int, Sequence[Edge]]) -> dict[int, Edge]:
    """Return ranks that wait in a circle, each with where it waits; all ranks that are waited for wait themselves."""
    path: dict[int, Edge] = {}
    rank = min(edges)
    while rank not in path:
        path[rank] = min(edges[rank], key=lambda edge: edge[0])
        rank = path[rank][0]
    ranks = list(path)
    return {one: path[one] for one in ranks[ranks.index(rank) :]}


def _mismatch(known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]]) -> HangBlame | None:
    """Return the first call of a communicator on which its ranks do not agree, with the fewer ranks to blame."""
    for communicator, ranks in members.items():
        here = [known[rank] for rank in ranks if rank in known]
        calls_here = [call for one in here for call in one.calls.get(communicator, ()) if call.peer < 0]
        for sequence in sorted({call.sequence for call in calls_here if not call.completed}):
            calls = {one.rank: call for one in here if (call := one.call(communicator, sequence)) is not None}
            counts = Counter(call.signature for call in calls.values())
            if len(counts) < 2:
                continue
            (most, _), *_ = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            odd = sorted(rank for rank, call in calls.items() if call.signature != most)
            if counts[most] * 2 == len(calls):
                odd = sorted(calls)  # one against one: either may be wrong
            said = f"call {sequence} of {communicator} is {most} on {names_of(_with(calls, most))}"
            others = "; ".join(f"{text} on {names_of(_with(calls, text))}" for text in sorted(counts) if text != most)
            waiting = sorted(set(calls) - set(odd))
            return HangBlame(
                HangKind.MISMATCH, tuple(odd), tuple(waiting), communicator, calls[odd[0]], f"{said}, but {others}"
            )
    return None


def _with(calls: Mapping[int, CollectiveCall], signature: str) -> list[int]:
    return [rank for rank, call in calls.items() if call.signature == signature]


def _all_entered(known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]]) -> HangBlame:
    """Return what it is where no rank is absent from a call: stuck, lagging, or no hang."""
    for communicator, ranks in members.items():
        here = [known[rank] for rank in ranks if rank in known]
        waiting = [(one, call) for one in here for name, call in one.waits_in() if name == communicator]
        if not waiting:
            continue
        call = min((call for _, call in waiting), key=lambda call: call.sequence)
        inside = sorted(one.rank for one, found in waiting if found.sequence == call.sequence)
        past = sorted(one.rank for one in here if (found := one.call(communicator, call.sequence)) and found.completed)
        which = f"{call.op} number {call.sequence} of {communicator}"
        if past:
            said = f"{names_of(past)} completed {which}, {names_of(inside)} did not"
            return HangBlame(HangKind.LAGGING, tuple(inside), (), communicator, call, said)
        said = f"all entered {which}, and none completed it: network or kernel"
        return HangBlame(HangKind.STUCK, (), tuple(inside), communicator, call, said)
    return HangBlame(HangKind.NONE, evidence="no rank waits in a call")


def names_of(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1, 5 and 20 more``."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {names(numbers)}"
