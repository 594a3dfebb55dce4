"""Ranks that have ended with 0 while all the others wait for them: a shorter data set, a bound that differs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from resilio_hpc.diagnose.hangs.blame import HangKind, blame, names_of
from resilio_hpc.diagnose.hangs.rank_sight import RankSight
from resilio_hpc.diagnose.hangs.verdict import counts, held_by_gpu, is_gone, rank_calls


def missed(
    now: Mapping[int, RankSight], before: Mapping[int, RankSight], between_s: float, world_size: int
) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks that have ended and are waited for, and how that is known; None where others may go on.

    Certain is only what was so at the look ``between_s`` seconds ``before``, too: each rank that lives waits in a call,
    and a rank whose calls are known has ended without that call.
    """
    if len(now) < world_size or any(one not in before or counts(before[one]) != counts(now[one]) for one in now):
        return None
    gone = {rank for rank, sight in now.items() if is_gone(sight) and is_gone(before[rank])}
    ranks, members = rank_calls(now, world_size)
    held = held_by_gpu(now, before, between_s)
    waits = all(one.rank in held or one.waits_in() for one in ranks if one.rank not in gone)
    found = blame(ranks, members)
    known = all(rank in gone and now[rank].groups for rank in found.ranks)
    if not waits or found.kind is not HangKind.ABSENT or not known:
        return None
    who = names_of(found.ranks)
    return found.ranks, f"{who} exited with 0 and {found.evidence.removeprefix(f'{who} ')}"
