"""Ranks that have ended with 0 while others wait for them: what is certain, and what is a healthy end."""

from __future__ import annotations

import msgspec
import pytest

from resilio_hpc.diagnose.hangs.early_ends import missed
from resilio_hpc.diagnose.hangs.rank_sight import CallSight, GpuSight, GroupSight, RankSight

WORLD = 4
APART_S = 5.0


def sight(rank: int, entered: int, waits: bool, state: str = "S", op: str = "all_reduce") -> RankSight:
    """A rank in one group of all, in its last call or past it."""
    group = GroupSight(7, "gloo", rank, WORLD, entered)
    call = CallSight(0, op, entered, completed=not waits)
    return RankSight(rank, state=state, begun=entered, completed=entered - waits, groups=(group,), calls=(call,))


def ended_early() -> dict[int, RankSight]:
    """Rank 2 has ended after call 20, and all others wait in call 21."""
    return {rank: sight(rank, 20, False, state="") if rank == 2 else sight(rank, 21, True) for rank in range(WORLD)}


def standing(now: dict[int, RankSight]) -> tuple[tuple[int, ...], str] | None:
    return missed(now, now, APART_S, WORLD)


def test_one_that_all_others_wait_for_is_named() -> None:
    said = "rank 2 exited with 0 and did not enter all_reduce number 21 of the gloo group of all ranks"
    assert standing(ended_early()) == ((2,), said)


def test_several_are_named() -> None:
    now = ended_early() | {1: sight(1, 20, False, state="")}
    found = standing(now)
    assert found is not None and found[0] == (1, 2)


def test_ranks_that_wait_for_their_gpu_wait() -> None:
    def queued(rank: int) -> RankSight:
        call = CallSight(0, "AllReduce", 21, completed=False, blocks=False)
        gpu = GpuSight(waits_for="cudaStreamSynchronize", waits_s=60.0)
        return msgspec.structs.replace(sight(rank, 21, True), calls=(call,), gpu=gpu)

    now = {rank: queued(rank) for rank in (0, 1, 3)} | {2: ended_early()[2]}
    assert standing(now) is not None
    now[3] = msgspec.structs.replace(now[3], gpu=GpuSight())  # it may never wait for this call
    assert standing(now) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({3: sight(3, 20, False, state="R")}, "one computes: it may be the one that they wait for"),
        ({2: sight(2, 21, False, state="")}, "it had entered the call before it ended"),
        ({2: RankSight(2)}, "its calls are not known"),
        ({2: sight(2, 20, False)}, "it lives"),
        ({rank: sight(rank, 20, False, state="R") for rank in (0, 1, 3)}, "the others write their reports"),
        ({rank: sight(rank, 20, False, state="") for rank in (0, 1, 3)}, "all have ended"),
    ],
)
def test_healthy_ends_are_left_alone(change: dict[int, RankSight], why: str) -> None:
    assert standing(ended_early() | change) is None, why


def test_what_moves_or_was_otherwise_at_the_look_before_is_not_certain() -> None:
    now = ended_early()
    assert missed(now, {}, 0.0, WORLD) is None
    assert missed(now, now | {3: sight(3, 20, False)}, APART_S, WORLD) is None
    assert missed(now, now | {2: sight(2, 20, False)}, APART_S, WORLD) is None, "it has just ended"
    del now[0]
    assert standing(now) is None, "an agent has not answered"


def test_the_root_of_a_broadcast_may_end_before_the_others_have_it() -> None:
    now = {rank: sight(rank, 21, rank != 2, state="" if rank == 2 else "S", op="broadcast") for rank in range(WORLD)}
    assert standing(now) is None
