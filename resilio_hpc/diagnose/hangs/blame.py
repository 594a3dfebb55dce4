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
    """Who holds up a hang. ``ranks``: those to look at; ``waiting``: those that wait for them, directly or not.

    ``blocks``: of a deadlock, whether each rank of the circle does nothing but wait in its call.
    """

    kind: HangKind
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    communicator: str = ""
    call: CollectiveCall | None = None
    evidence: str = ""
    blocks: bool = False


class Wait(msgspec.Struct, frozen=True):
    """A call in which a rank waits for others. ``absent``: shared by all that wait in the same call."""

    absent: tuple[int, ...]
    communicator: str
    call: CollectiveCall


def blame(ranks: Sequence[RankCalls], members: Mapping[str, Sequence[int]]) -> HangBlame:
    """Return who holds up the others. ``members``: all ranks of each communicator, also those that called nothing.

    Takes time in proportion to the ranks, their communicators and the calls that are given.
    """
    known = {one.rank: one for one in ranks}
    if differing := _mismatch(known, members):
        return differing
    for beside in (False, True):  # calls beside a program keep no rank, but may be all that is known
        waits = _waits(known, members, beside)
        if waits:
            return _end_of_the_walk(waits, known)
    return _all_entered(known, members)


def _waits(known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]], beside: bool) -> dict[int, list[Wait]]:
    """Return what keeps each rank in the calls that it has not completed; ranks that wait for no other are left out."""
    absent: dict[tuple[str, int], tuple[int, ...]] = {}
    found: dict[int, list[Wait]] = {}
    for rank, one in known.items():
        here: list[Wait] = []
        for communicator, call in one.waits_in(beside):
            if here and here[-1].communicator == communicator:
                continue  # an earlier call of it waits
            if call.peer >= 0:
                if not _is_met(rank, call, communicator, known.get(call.peer)):
                    here.append(Wait((call.peer,), communicator, call))
                continue
            key = communicator, call.sequence
            if key not in absent:
                absent[key] = _absent(members.get(communicator, ()), communicator, call.sequence, known)
            if absent[key]:
                here.append(Wait(absent[key], communicator, call))
        if here:
            found[rank] = here
    return found


def _absent(
    members: Sequence[int], communicator: str, sequence: int, known: Mapping[int, RankCalls]
) -> tuple[int, ...]:
    """Return the members that have not entered a call."""
    return tuple(rank for rank in members if rank not in known or known[rank].entered(communicator) < sequence)


def _is_met(rank: int, call: CollectiveCall, communicator: str, other: RankCalls | None) -> bool:
    """Return whether the peer of a send or receive is inside the other half of it: earlier ones are completed."""
    if other is None:
        return False
    theirs = other.calls.get(communicator, [])
    return any(found.peer == rank and found.op != call.op and not found.completed for found in theirs)


def _end_of_the_walk(waits: Mapping[int, Sequence[Wait]], known: Mapping[int, RankCalls]) -> HangBlame:
    """Follow who waits for whom to the ranks that wait for no other, or around a circle."""
    ends: dict[int, Wait] = {}
    seen: set[tuple[str, int, tuple[int, ...], bool]] = set()
    for wait in (wait for rank in sorted(waits) for wait in waits[rank]):
        has_place = bool(wait.call.place)
        key = wait.communicator, wait.call.sequence, wait.absent if wait.call.peer >= 0 else (), has_place
        if key in seen:
            continue
        seen.add(key)
        for target in wait.absent:
            if target not in ends or (has_place and not ends[target].call.place):
                ends[target] = wait
    roots = sorted(rank for rank in ends if rank not in waits)
    # one that is inside a call, too, waits there for a rank of which nothing is known
    roots = [rank for rank in roots if rank not in known or not known[rank].waits_in()] or roots
    waiting = tuple(sorted(waits))
    if roots:
        end = ends[roots[0]]
        call = end.call
        silent = [rank for rank in roots if rank not in known]
        which = f"{call.op} number {call.sequence}" if call.peer < 0 else f"the other end of a {call.op}"
        said = f"{names_of(roots)} did not enter {which} of {end.communicator}"
        said += f", in which others wait at {call.place}" if call.place else ""
        if silent:
            said += f"; nothing is known of {names_of(silent)}"
        return HangBlame(HangKind.ABSENT, tuple(roots), waiting, end.communicator, call, said)
    circle = _circle(waits)
    ranks, first = tuple(sorted(circle)), next(iter(circle.values()))[1]
    steps = [f"rank {rank} in {wait.communicator} for rank {to}" for rank, (to, wait) in circle.items()]
    said = f"they wait in a circle: {names(steps)}"
    blocks = all(wait.call.blocks for _, wait in circle.values())
    return HangBlame(HangKind.DEADLOCK, ranks, waiting, first.communicator, first.call, said, blocks)


def _circle(waits: Mapping[int, Sequence[Wait]]) -> dict[int, tuple[int, Wait]]:
    """Return ranks that wait in a circle, each with whom it waits for; all that are waited for wait themselves."""
    path: dict[int, tuple[int, Wait]] = {}
    rank = min(waits)
    while rank not in path:
        path[rank] = min(((min(wait.absent), wait) for wait in waits[rank]), key=lambda one: one[0])
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
        waiting = [(one, call) for one in here for name, call in one.waits_in(beside=True) if name == communicator]
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
