"""What the calls of dead ranks say of who waited for whom.

A rank that had entered a call which a peer never entered waited for that peer, so the peer's end cannot follow from its
own there. Where calls are queued on a GPU (NCCL), a program runs ahead of them, and being ahead says less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from resilio_hpc.diagnose.cascade.death import Death
from resilio_hpc.diagnose.hangs.call_ring import QUEUED


class CallStanding(msgspec.Struct, frozen=True):
    """A dead rank among its peers. ``ahead``: it had entered more calls than a dead peer.

    ``waited``: it was ahead, and so waited for that peer. ``awaited``: by a dead peer, and it waited for none.
    ``share``: of its communicators, those in which a dead peer was ahead of it, and it alone had fallen behind.
    """

    waited: bool = False
    ahead: bool = False
    awaited: bool = False
    share: float = 0.0
    awaited_in: str = ""


def standings(deaths: Sequence[Death]) -> list[CallStanding]:
    """Return where each death stands, in time that grows with the ranks and their communicators."""
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)  # communicator → (death, calls entered)
    names: dict[int, str] = {}
    queued: dict[int, bool] = {}
    for index, death in enumerate(deaths):
        for group in death.groups:
            members[group.id].append((index, group.entered))
            names[group.id] = f"the {group.family} group of {group.size} ranks"
            queued[group.id] = group.family in QUEUED
    known, ahead, waited, awaited = Counter[int](), set[int](), set[int](), defaultdict[int, list[str]](list)
    for key, entered in members.items():
        if len(entered) < 2:
            continue
        counts = [count for _, count in entered]
        least, most = min(counts), max(counts)
        last_one = counts.count(least) == 1 and (len(counts) > 2 or not queued[key])
        for index, count in entered:
            known[index] += 1
            if count > least:
                ahead.add(index)
                if not queued[key]:
                    waited.add(index)
            if count == least < most and last_one:
                awaited[index].append(names[key])
    return [
        CallStanding(index in waited, index in ahead, bool(found := awaited.get(index)) and index not in waited,
                 len(found or ()) / max(1, known[index]), (found or [""])[0])
        for index in range(len(deaths))
    ]  # fmt: skip


def silent_ranks(deaths: Sequence[Death], world_size: int) -> set[int] | None:
    """Return the ranks that others waited for and that said nothing; None where too little is known to say.

    Their number in a communicator is known; which rank that is follows where members stand in a regular order.
    """
    reported = {death.rank for death in deaths if death.rank >= 0}
    found = set(range(world_size)) - reported if 0 <= world_size - len(reported) <= max(8, world_size // 8) else set()
    sizes: dict[int, int] = {}
    numbers: dict[int, dict[int, int]] = defaultdict(dict)
    for death in deaths:
        for group in death.groups:
            if group.rank >= 0 and death.rank >= 0:
                numbers[group.id][group.rank] = death.rank
                sizes[group.id] = group.size
    by_calls = set[int]()
    for key, known in numbers.items():
        if not 2 <= len(known) < sizes[key] or len(known) * 2 < sizes[key]:
            continue
        (first, rank), (last, other) = min(known.items()), max(known.items())
        stride, rest = divmod(other - rank, last - first)
        if rest or any(rank + stride * (number - first) != value for number, value in known.items()):
            continue
        by_calls |= {rank + stride * (n - first) for n in range(sizes[key]) if n not in known} - reported
    return (found & by_calls or found or by_calls) or None
