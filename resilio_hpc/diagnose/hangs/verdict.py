"""What a run without progress means, from two looks at all its ranks. Pure.

A rank that is stopped, ranks that wait in a circle, and calls that do not agree are certain once nothing has moved
between the looks. A rank that runs, sleeps in the kernel, or is held by a debugger, may come back: only time tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec

from resilio_hpc.diagnose.hangs.blame import HangBlame, HangKind, blame, names_of
from resilio_hpc.diagnose.hangs.call_ring import QUEUED
from resilio_hpc.diagnose.hangs.calls import CollectiveCall, RankCalls
from resilio_hpc.diagnose.hangs.rank_sight import GONE, STOPPED, TRACED, RankSight
from resilio_hpc.events.phrases import names

BUSY_SHARE = 0.5  # of the time between two looks on a processor: it computes
WAITS_SEEN = ("gloo",)  # families whose sends and receives are known to be waited for, or not


class HangVerdict(msgspec.Struct, frozen=True):
    """Why a run stands still. ``ranks``: those to blame, () where that is not known; ``certain``: it will not end.

    ``moves``: calls were begun or completed between the looks, so this is no hang. ``in_kernel``: the rank to blame
    waits for a disk, a file system or a driver.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    evidence: str
    certain: bool = False
    moves: bool = False
    in_kernel: bool = False


def judge(
    now: Mapping[int, RankSight], before: Mapping[int, RankSight], between_s: float, world_size: int
) -> HangVerdict:
    """Return the verdict. ``before``: the look ``between_s`` seconds earlier, {} without one: then nothing is sure."""
    moved = [rank for rank, sight in now.items() if rank in before and counts(sight) != counts(before[rank])]
    stopped = _in_state(now, STOPPED) or _in_state(now, TRACED)
    gone = tuple(sorted(rank for rank, sight in now.items() if is_gone(sight)))
    silent = tuple(rank for rank in range(world_size) if rank not in now)
    ranks, members = rank_calls(now, world_size)
    found = blame(ranks, members)
    meets = _meeting(now) if found.kind is HangKind.NONE else None
    if stopped:
        was = [before[rank].state for rank in stopped if rank in before]
        still = bool(was) and not moved and all(state == STOPPED for state in was)
        how = "stopped (SIGSTOP)" if now[stopped[0]].state == STOPPED else "held by a debugger"
        said = f"{names_of(stopped)} {_is(stopped)} {how}"
        said = _with_calls(said, stopped, meets or found)
        return HangVerdict(HangKind.ABSENT, stopped, said, certain=still)
    waits = found.kind is not HangKind.NONE or meets is not None or any(one.step >= 0 for one in now.values())
    if silent or (gone and waits):  # else it has ended, and no rank is known to miss it
        said = f"nothing is seen of {names_of(gone or silent)}"
        return HangVerdict(HangKind.ABSENT, gone or silent, said, moves=bool(moved))
    if moved:
        return HangVerdict(found.kind, (), f"{names_of(moved)} made calls meanwhile", moves=True)
    if meets is not None:
        found = meets
    queued = found.kind in (HangKind.STUCK, HangKind.LAGGING) and _is_queued(found)
    if queued and (held := held_by_gpu(now, before, between_s)):
        return _by_gpu(found, held, now)
    if found.kind is HangKind.NONE or queued:
        return _by_steps(now)
    said = found.evidence
    if found.kind is HangKind.ABSENT:
        said += "; " + _what_it_does(found.ranks[0], now, before, between_s)
    in_kernel = any(rank in now and now[rank].state == "D" for rank in found.ranks)
    sure = found.kind is HangKind.MISMATCH or (found.kind is HangKind.DEADLOCK and found.blocks and _agree(now, found))
    certain = bool(before) and sure
    return HangVerdict(found.kind, found.ranks, said, certain=certain, in_kernel=in_kernel)


def _agree(now: Mapping[int, RankSight], found: HangBlame) -> bool:
    """Return whether all members have the communicators in which the blamed ranks wait.

    A rank that made its groups more often than its peers, after an error of its own, has them under other ids.
    """
    have = Counter(group.id for sight in now.values() for group in sight.groups)
    calls = [(now[rank].groups, call) for rank in found.ranks for call in now[rank].calls]
    waits = [(groups, call) for groups, call in calls if call.blocks and not call.completed]
    within = [groups[call.group] for groups, call in waits if call.group < len(groups)]
    return all(have[group.id] == group.size for group in within)


def _in_state(now: Mapping[int, RankSight], state: str) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, sight in now.items() if sight.state == state))


def _meeting(now: Mapping[int, RankSight]) -> HangBlame | None:
    """Return who holds up the ranks that wait for their peers to come to a process group; None where none waits."""
    waiting = {rank: sight for rank, sight in now.items() if sight.joins}
    if not waiting:
        return None
    first = waiting[min(waiting)]
    call = CollectiveCall(0, first.joins, "", False, -1, first.place)
    absent = tuple(sorted(now.keys() - waiting.keys()))
    where = f" at {first.place}" if first.place else ""
    if not absent:
        said = f"all ranks wait in {first.joins}{where}, and none goes on: network or rendezvous store"
        return HangBlame(HangKind.STUCK, (), tuple(sorted(waiting)), "", call, said)
    said = f"{names_of(absent)} did not come to {first.joins}, in which others wait{where}"
    return HangBlame(HangKind.ABSENT, absent, tuple(sorted(waiting)), "", call, said)


def rank_calls(sights: Mapping[int, RankSight], world_size: int) -> tuple[list[RankCalls], dict[str, tuple[int, ...]]]:
    """Return each rank's calls, and the members of each communicator, all under names for people."""
    members: dict[int, dict[int, int]] = defaultdict(dict)  # communicator → rank → its number there
    sizes: dict[int, int] = {}
    families: dict[int, str] = {}
    for rank, sight in sights.items():
        for group in sight.groups:
            members[group.id][rank] = group.rank
            sizes[group.id], families[group.id] = group.size, group.family
    named: dict[int, str] = {}
    used: Counter[str] = Counter()
    ranks_of: dict[str, tuple[int, ...]] = {}
    for group_id in sorted(members, key=lambda one: (-len(members[one]), min(members[one]), one)):
        known = tuple(sorted(members[group_id]))
        everyone = tuple(range(world_size)) if sizes[group_id] == world_size else known
        of = "all ranks" if len(everyone) == world_size else f"ranks {names([str(rank) for rank in everyone])}"
        name = f"the {families[group_id]} group of {of}".replace("  ", " ")
        used[name] += 1
        named[group_id] = name if used[name] == 1 else f"{name} ({used[name]})"
        ranks_of[named[group_id]] = everyone
    by_number = {group_id: {number: rank for rank, number in ranks.items()} for group_id, ranks in members.items()}
    return [_calls_of(sight, named, by_number) for _, sight in sorted(sights.items())], ranks_of


def _calls_of(sight: RankSight, named: Mapping[int, str], by_number: Mapping[int, Mapping[int, int]]) -> RankCalls:
    calls: dict[str, list[CollectiveCall]] = {}
    for call in sight.calls:
        if not 0 <= call.group < len(sight.groups):
            continue
        group_id = sight.groups[call.group].id
        is_collective = call.sequence > 0
        seen = not is_collective and sight.groups[call.group].family in WAITS_SEEN
        peer = -1 if is_collective else by_number[group_id].get(call.peer, -1)
        if not is_collective and peer < 0:
            continue
        calls.setdefault(named[group_id], []).append(
            CollectiveCall(call.sequence, call.op, call.shape, call.completed, -1 if is_collective else peer,
                           sight.place, call.blocks, call.awaited or not seen)
        )  # fmt: skip
    return RankCalls(sight.rank, calls)


def held_by_gpu(now: Mapping[int, RankSight], before: Mapping[int, RankSight], between_s: float) -> tuple[int, ...]:
    """Return the ranks whose program has waited for its GPU, or was in one launch, all the time between the looks."""
    found = []
    for rank, sight in sorted(now.items()):
        was = before[rank].gpu if rank in before else None
        if sight.gpu is None or was is None:
            continue
        waits = bool(sight.gpu.waits_for) and sight.gpu.waits_s >= between_s
        launches = min(sight.gpu.launching, was.launching) > 0 and sight.gpu.launches == was.launches
        if waits or launches:
            found.append(rank)
    return tuple(found)


def _by_gpu(found: HangBlame, held: tuple[int, ...], now: Mapping[int, RankSight]) -> HangVerdict:
    """Return what a GPU's facts tell where all entered the same calls, whose end is not seen."""
    others = tuple(rank for rank in sorted(now) if rank not in held)
    said = f"all entered the same calls of {found.communicator}, and {_gpu_wait(held[0], now)}"
    if len(held) > 1:
        said += f", as {names_of(held[1:])} {'has' if len(held) == 2 else 'have'}"
    said += f"; {names_of(others)} {'has' if len(others) == 1 else 'have'} not" if others else ""
    return HangVerdict(HangKind.STUCK, (), f"{said}: network or kernel")


def _gpu_wait(rank: int, now: Mapping[int, RankSight]) -> str:
    gpu = now[rank].gpu
    if gpu is None or not gpu.waits_for:
        return f"rank {rank} has been inside one kernel launch"
    return f"rank {rank} has waited for its GPU ({gpu.waits_for}) for {gpu.waits_s:.0f} s"


def _is_queued(found: HangBlame) -> bool:
    """Return whether the end of the call need not be seen: all ranks may be far beyond it."""
    return found.communicator.startswith(tuple(f"the {family} " for family in QUEUED))


def is_gone(sight: RankSight) -> bool:
    """Return whether a rank's process has ended."""
    return not sight.state or sight.state in GONE


def counts(sight: RankSight) -> tuple[int, int]:
    """Return how many calls a rank has begun, and how many it has completed."""
    return sight.begun, sight.completed


def _with_calls(said: str, stopped: tuple[int, ...], found: HangBlame) -> str:
    if found.kind is not HangKind.ABSENT or not set(stopped) & set(found.ranks):
        return said
    return f"{said}, and {found.evidence.removeprefix(names_of(stopped) + ' ')}"


def _is(ranks: tuple[int, ...]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _what_it_does(rank: int, now: Mapping[int, RankSight], before: Mapping[int, RankSight], between_s: float) -> str:
    """Return what a rank does instead of its call."""
    sight = now.get(rank)
    if sight is None:
        return f"nothing is seen of rank {rank}"
    where = f" at {sight.place}" if sight.place else ""
    if sight.state == "D":
        inside = f" ({sight.waits_in})" if sight.waits_in else ""
        return f"rank {rank} sleeps in the kernel{inside}{where}: a disk, a file system or a driver"
    if rank in held_by_gpu(now, before, between_s):
        return f"{_gpu_wait(rank, now)}{where}"
    earlier = before.get(rank)
    spent_s = sight.cpu_s - earlier.cpu_s if earlier is not None else 0.0
    if earlier is not None and spent_s > BUSY_SHARE * between_s > 0:
        return f"rank {rank} computes{where}"
    if sight.state == "S":
        return f"rank {rank} sleeps{f' in {sight.waits_in}' if sight.waits_in else ''}{where}"
    return f"rank {rank} runs{where}"


def _by_steps(now: Mapping[int, RankSight]) -> HangVerdict:
    """Return what steps tell where no rank is known to wait in a call."""
    steps = {rank: sight.step for rank, sight in now.items() if sight.step >= 0}
    least = min(steps.values(), default=-1)
    behind = tuple(sorted(rank for rank, step in steps.items() if step == least))
    if not behind or len(behind) * 2 > len(steps):
        return HangVerdict(HangKind.NONE, (), "no rank is known to wait for another: they may compute, read or write")
    said = f"{names_of(behind)} {'has' if len(behind) == 1 else 'have'} done {least} steps, others more"
    return HangVerdict(HangKind.ABSENT, behind, said)
