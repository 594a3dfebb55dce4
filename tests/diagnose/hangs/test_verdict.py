"""What a run without progress means: by processes, calls and steps, and what is certain."""

from __future__ import annotations

import msgspec
import pytest

from resilio_hpc.diagnose.hangs.blame import HangKind
from resilio_hpc.diagnose.hangs.rank_sight import CallSight, GpuSight, GroupSight, RankSight
from resilio_hpc.diagnose.hangs.verdict import HangVerdict, judge, rank_calls

WORLD = 4


def sight(rank: int, entered: int, waits: bool, **facts: object) -> RankSight:
    """A rank in one group of all, in its last call or past it."""
    group = GroupSight(7, "gloo", rank, WORLD, entered)
    call = CallSight(0, "all_reduce", entered, completed=not waits)
    done = entered - waits
    fields = {"step": done, "state": "S", "begun": entered, "completed": done, **facts}
    return RankSight(rank, groups=(group,), calls=(call,), **fields)  # type: ignore[arg-type]


def world(*sights: RankSight) -> dict[int, RankSight]:
    return {one.rank: one for one in sights}


def standing(now: dict[int, RankSight]) -> HangVerdict:
    """Judge a run that looks the same twice, two seconds apart."""
    return judge(now, now, 2.0, WORLD)


def waiting_for(rank: int, **facts: object) -> dict[int, RankSight]:
    """All others wait in a call that this rank has not entered."""
    return world(*(sight(one, 20 if one == rank else 21, one != rank, **(facts if one == rank else {}))
                   for one in range(WORLD)))  # fmt: skip


def test_a_stopped_rank_is_certain_the_second_time() -> None:
    now = waiting_for(2, state="T")
    verdict = standing(now)
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.ABSENT, (2,), True)
    assert verdict.evidence == (
        "rank 2 is stopped (SIGSTOP), and did not enter all_reduce number 21 of the gloo group of all ranks"
    )
    assert not judge(now, {}, 0.0, WORLD).certain
    assert not judge(now, waiting_for(2), 2.0, WORLD).certain  # it ran a moment ago


def test_a_rank_that_a_debugger_holds_may_come_back() -> None:
    """Someone looks at it, or gcore writes its memory down."""
    verdict = standing(waiting_for(2, state="t"))
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.ABSENT, (2,), False)
    assert verdict.evidence.startswith("rank 2 is held by a debugger, and did not enter all_reduce number 21")
    both = standing(waiting_for(2, state="t") | {3: sight(3, 20, False, state="T")})
    assert (both.ranks, both.certain) == ((3,), True)


@pytest.mark.parametrize(
    ("facts", "earlier", "words"),
    [
        ({"state": "R", "cpu_s": 9.0, "place": "train.py:88"}, {"cpu_s": 7.1}, "rank 2 computes at train.py:88"),
        ({"state": "D", "waits_in": "nfs_wait"}, {}, "rank 2 sleeps in the kernel (nfs_wait): a disk, a file system"),
        ({"state": "S", "waits_in": "futex"}, {}, "rank 2 sleeps in futex"),
        ({"state": "R"}, {}, "rank 2 runs"),
    ],
)
def test_a_rank_that_may_come_back_is_blamed_and_not_certain(
    facts: dict[str, object], earlier: dict[str, object], words: str
) -> None:
    verdict = judge(waiting_for(2, **facts), waiting_for(2, **earlier), 2.0, WORLD)
    assert (verdict.kind, verdict.ranks, verdict.certain, verdict.moves) == (HangKind.ABSENT, (2,), False, False)
    assert words in verdict.evidence


def test_calls_that_go_on_are_no_hang() -> None:
    before = world(*(sight(rank, 20, True) for rank in range(WORLD)))
    now = before | {3: sight(3, 21, True)}
    verdict = judge(now, before, 2.0, WORLD)
    assert verdict.moves
    assert not verdict.certain
    assert verdict.evidence == "rank 3 made calls meanwhile"


def test_a_rank_of_which_nothing_is_seen_is_blamed() -> None:
    now = waiting_for(1)
    del now[1]
    assert standing(now).ranks == (1,)
    assert standing(waiting_for(1, state="")).ranks == (1,)
    assert standing(waiting_for(1, state="Z")).ranks == (1,)


def test_calls_that_do_not_agree_are_certain() -> None:
    now = world(*(sight(rank, 21, True) for rank in range(WORLD)))
    odd = msgspec.structs.replace(now[3], calls=(CallSight(0, "barrier", 21),))
    verdict = standing(now | {3: odd})
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.MISMATCH, (3,), True)


def in_two_groups(rank: int, *calls: CallSight, entered: tuple[int, int]) -> RankSight:
    groups = tuple(GroupSight(number + 1, "gloo", rank, WORLD, count) for number, count in enumerate(entered))
    return RankSight(rank, 5, "S", begun=9, completed=8, groups=groups, calls=calls)


def test_ranks_that_wait_for_each_other_are_certain() -> None:
    first, second = CallSight(0, "all_reduce", 4), CallSight(1, "all_reduce", 4)
    now = world(
        *(in_two_groups(rank, first, entered=(4, 3)) for rank in (0, 2, 3)), in_two_groups(1, second, entered=(3, 4))
    )
    verdict = standing(now)
    assert (verdict.kind, verdict.certain) == (HangKind.DEADLOCK, True)
    assert 1 in verdict.ranks
    assert "group of all ranks (2)" in verdict.evidence


def test_ranks_that_count_their_groups_differently_are_not_certain() -> None:
    """One rank has made the group of all again, by itself: it has another id there, and all are in one slow call."""
    now = {rank: sight(rank, 21, True) for rank in range(WORLD)}
    alone = msgspec.structs.replace(now[1].groups[0], id=8)
    now[1] = msgspec.structs.replace(now[1], groups=(now[1].groups[0], alone), calls=(CallSight(1, "all_reduce", 21),))
    verdict = standing(now)
    assert (verdict.kind, verdict.certain) == (HangKind.DEADLOCK, False)


def test_a_rank_that_computes_beside_a_call_is_not_in_a_circle() -> None:
    beside, keeps = CallSight(0, "all_reduce", 4, blocks=False), CallSight(1, "all_reduce", 4)
    now = world(
        *(in_two_groups(rank, keeps, entered=(3, 4)) for rank in (0, 2, 3)), in_two_groups(1, beside, entered=(4, 3))
    )
    verdict = standing(now)
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.ABSENT, (1,), False)


def test_a_circle_of_calls_beside_programs_is_not_certain() -> None:
    first, second = CallSight(0, "all_reduce", 4, blocks=False), CallSight(1, "all_reduce", 4, blocks=False)
    now = world(
        *(in_two_groups(rank, first, entered=(4, 3)) for rank in (0, 2, 3)), in_two_groups(1, second, entered=(3, 4))
    )
    verdict = standing(now)
    assert (verdict.kind, verdict.certain) == (HangKind.DEADLOCK, False)


def test_where_no_end_is_seen_the_same_last_call_of_all_tells_nothing() -> None:
    def queued(rank: int, entered: int) -> RankSight:
        group = GroupSight(7, "nccl", rank, WORLD, entered)
        calls = (CallSight(0, "all_reduce", entered, blocks=False),)
        return RankSight(rank, 5, "R", begun=entered, completed=0, groups=(group,), calls=calls)

    assert standing(world(*(queued(rank, 9) for rank in range(WORLD)))).kind is HangKind.NONE
    behind = standing(world(*(queued(rank, 8 if rank == 3 else 9) for rank in range(WORLD))))
    assert (behind.kind, behind.ranks, behind.certain) == (HangKind.ABSENT, (3,), False)


def test_all_in_one_call_is_the_network_or_a_kernel() -> None:
    verdict = standing(world(*(sight(rank, 21, True) for rank in range(WORLD))))
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.STUCK, (), False)


def test_without_calls_the_steps_tell_where_few_are_behind() -> None:
    ranks = [RankSight(rank, 19 if rank == 2 else 20, "S") for rank in range(WORLD)]
    assert standing(world(*ranks)).ranks == (2,)
    all_the_same = [RankSight(rank, 20, "S") for rank in range(WORLD)]
    assert standing(world(*all_the_same)).ranks == ()
    assert standing({}).ranks == tuple(range(WORLD))


def test_groups_are_named_by_their_ranks() -> None:
    group = GroupSight(5, "nccl", 0, 2, 3)
    sights = {rank: RankSight(rank, groups=(msgspec.structs.replace(group, rank=rank % 2, id=5 + rank // 2),))
              for rank in range(4)}  # fmt: skip
    _, members = rank_calls(sights, 4)
    assert members == {"the nccl group of ranks 0, 1": (0, 1), "the nccl group of ranks 2, 3": (2, 3)}


def test_a_receive_is_matched_by_the_ranks_of_its_group() -> None:
    groups = {rank: (GroupSight(5, "gloo", number, 2, 0),) for number, rank in enumerate((1, 3))}
    receives = RankSight(3, 1, "S", groups=groups[3], calls=(CallSight(0, "recv", 0, peer=0),), begun=1, completed=0)
    idle = RankSight(1, 1, "R", groups=groups[1], begun=0, completed=0)
    others = [RankSight(rank, 1, "R", begun=0, completed=0) for rank in (0, 2)]
    verdict = standing(world(receives, idle, *others))
    assert (verdict.kind, verdict.ranks) == (HangKind.ABSENT, (1,))


@pytest.mark.parametrize(
    ("family", "awaited", "kind"),
    [
        ("gloo", False, HangKind.NONE),  # all compute: nothing is missing yet
        ("gloo", True, HangKind.DEADLOCK),
        ("nccl", False, HangKind.DEADLOCK),  # whether a program waits for the call is not seen
        ("MPI", False, HangKind.DEADLOCK),
    ],
)
def test_a_send_that_no_program_waits_for_keeps_no_rank(family: str, awaited: bool, kind: HangKind) -> None:
    def sent(rank: int) -> RankSight:
        group = GroupSight(5, family, rank, WORLD, 3)
        call = CallSight(0, "send", 0, peer=(rank + 1) % WORLD, blocks=False, awaited=awaited)
        return RankSight(rank, 5, "S", groups=(group,), calls=(call,), begun=9, completed=8)

    verdict = standing(world(*(sent(rank) for rank in range(WORLD))))
    assert (verdict.kind, verdict.certain) == (kind, False)


def queued(rank: int, entered: int, done: int, **facts: object) -> RankSight:
    """A rank that queued NCCL calls, of which the GPU is known to have done some."""
    group = GroupSight(7, "nccl", rank, WORLD, entered)
    calls = tuple(CallSight(0, "all_reduce", number, blocks=False) for number in range(done + 1, entered + 1))
    fields = {"state": "R", "begun": entered, "completed": 3, **facts}
    return RankSight(rank, groups=(group,), calls=calls, **fields)  # type: ignore[arg-type]


def test_a_rank_that_queued_fewer_calls_than_others_is_found_by_the_first_one() -> None:
    now = world(*(queued(rank, 40 if rank == 1 else 50, 30 + rank) for rank in range(WORLD)))
    verdict = standing(now)
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.ABSENT, (1,), False)
    assert verdict.evidence == ("rank 1 did not enter all_reduce number 41 of the nccl group of all ranks; rank 1 runs")


def test_a_gpu_that_does_not_go_on_is_told_from_a_program_that_does_not() -> None:
    in_wait, out = GpuSight("a stream", 42.0, launches=9, waits=4), GpuSight(launches=9, waits=4)
    now = world(*(queued(rank, 50, 30 + rank, gpu=in_wait) for rank in range(WORLD)))
    verdict = standing(now)
    assert (verdict.kind, verdict.ranks, verdict.certain) == (HangKind.STUCK, (), False)
    assert verdict.evidence == (
        "all entered the same calls of the nccl group of all ranks, and rank 0 has waited for its GPU (a stream) for "
        "42 s, as ranks 1, 2, 3 have: network or kernel"
    )
    some = world(*(queued(rank, 50, 30, gpu=in_wait if rank != 2 else out) for rank in range(WORLD)))
    assert "; rank 2 has not: network or kernel" in standing(some).evidence
    none = world(*(queued(rank, 50, 30 + rank, gpu=out) for rank in range(WORLD)))
    assert standing(none).kind is HangKind.NONE  # not "lagging": that an end was not seen tells nothing
    just = world(*(queued(rank, 50, 30, gpu=GpuSight("a stream", 1.0)) for rank in range(WORLD)))
    assert standing(just).kind is HangKind.NONE


def test_a_launch_that_does_not_return_waits_for_the_gpu_too() -> None:
    full = GpuSight(launches=1024, launching=1)
    now = world(*(queued(rank, 50, 30, gpu=full) for rank in range(WORLD)))
    assert "rank 0 has been inside one kernel launch" in standing(now).evidence
    before = world(*(queued(rank, 50, 30, gpu=GpuSight(launches=1023, launching=1)) for rank in range(WORLD)))
    assert judge(now, before, 2.0, WORLD).kind is HangKind.NONE


def test_what_an_absent_rank_does_with_its_gpu_is_told() -> None:
    verdict = standing(waiting_for(2, state="R", gpu=GpuSight("the device", 7.4)))
    assert verdict.evidence.endswith("rank 2 has waited for its GPU (the device) for 7 s")
