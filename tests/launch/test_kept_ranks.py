"""An agent that has ranks leave their round: which are asked, for how long they are awaited, and when none is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.core import rank_link
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.kept_ranks import ANSWER_S, ENTER_S, LEAVE_S, MOST_FRUITLESS, KeptRanks
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_reentry import RankReentry

MEMBER = m.Member("n1", 0, "n1", 3, 0)


def round_of(number: int) -> LocalRound:
    return LocalRound("n1", m.RoundState(1, number, m.world_of((MEMBER,)), 0, 0, ()), MEMBER, None)


class Agent:
    """Three ranks of one node, which can all enter another round."""

    def __init__(self, policy: str = "in-process") -> None:
        self.events: list[dict[str, Any]] = []
        self.asked: list[int] = []
        self.kept: frozenset[int] | None = None
        self.now = 100.0
        options = SimpleNamespace(reentry=SimpleNamespace(restart_policy=policy))
        context: Any = SimpleNamespace(
            options=options, record=lambda kind, **fields: self.events.append({"e": kind, "node": "n1"} | fields)
        )
        self.failed: list[tuple[int, str]] = []
        self.ranks: Any = SimpleNamespace(
            local=None, ranks_left=self.left, spawn_failed=lambda rank, why, _: self.failed.append((rank, why))
        )
        self.stopped: set[int] = set()
        self.parts = KeptRanks(context, self.ranks, self.tell, lambda: self.now, self.stopped.__contains__)
        self.begin_round(5)

    def begin_round(self, number: int, kept: int = 0, steps: bool = False) -> None:
        self.local = self.ranks.local = round_of(number)
        self.kept, self.asked = None, []
        for rank in range(kept):
            self.local.ranks[rank].is_kept = True
        for rank in range(3):
            self.says(rank, rank_link.CanReenter())
            if steps:
                self.says(rank, rank_link.StepDone(1, 1.0))

    def tell(self, rank: int, message: rank_link.AgentMessage) -> None:
        assert message == rank_link.LeaveRound()
        self.asked.append(rank)

    def left(self, kept: frozenset[int]) -> None:
        self.kept = kept

    def says(self, rank: int, message: rank_link.RankMessage) -> None:
        self.local.said(rank, message, self.now)

    def leaves(self, *ranks: int) -> None:
        for rank in ranks:
            self.says(rank, rank_link.LeavingRound())
            self.says(rank, rank_link.LeftRound(0.1))

    def after(self, seconds: float) -> frozenset[int] | None:
        self.now += seconds
        self.parts.tick()
        return self.kept


def test_those_that_live_are_asked_and_kept_when_they_have_left() -> None:
    agent = Agent()
    agent.local.exited(1, None, 9, 0.0, ("", ""))
    assert agent.parts.begin(agent.local)
    assert agent.asked == [0, 2]
    assert agent.parts.begin(agent.local), "the order came twice"
    assert agent.asked == [0, 2]
    agent.leaves(0)
    assert agent.after(0.1) is None
    agent.leaves(2)
    assert agent.after(0.0) == {0, 2}
    (event,) = agent.events
    assert (event["kept"], event["of"], event["others"]) == (2, 3, [])
    assert "2 of 3 processes left it" in words("ranks_left", event)


def test_one_that_does_not_answer_is_awaited_for_a_moment_and_one_that_leaves_for_longer() -> None:
    agent = Agent()
    agent.parts.begin(agent.local)
    agent.leaves(0)
    agent.says(2, rank_link.LeavingRound())
    assert agent.after(ANSWER_S + 0.01) is None
    agent.leaves(2)
    assert agent.after(0.0) == {0, 2}
    assert agent.events[0]["others"] == [1]
    again = Agent()
    again.parts.begin(again.local)
    for rank in range(3):
        again.says(rank, rank_link.LeavingRound())
    assert again.after(LEAVE_S - 0.01) is None
    assert again.after(0.02) == frozenset()


def test_one_that_is_stopped_is_not_awaited() -> None:
    agent = Agent()
    agent.stopped.add(1)
    agent.parts.begin(agent.local)
    agent.leaves(0, 2)
    assert agent.after(0.0) == {0, 2}
    assert agent.events[0]["others"] == [1]


def test_a_rank_that_ends_meanwhile_or_is_done_or_has_a_bad_copy_is_not_kept() -> None:
    agent = Agent()
    agent.says(2, rank_link.Finished(9))
    agent.parts.begin(agent.local)
    assert agent.asked == [0, 1]
    agent.leaves(0, 1)
    agent.local.exited(1, None, 9, 0.0, ("", ""))
    assert agent.after(0.0) == {0}


@pytest.mark.parametrize("policy", ["all", "in-process"])
def test_none_is_asked_by_the_other_policy_or_where_none_can(policy: str) -> None:
    agent = Agent(policy)
    if policy == "in-process":
        agent.local = agent.ranks.local = round_of(5)
    assert not agent.parts.begin(agent.local)
    assert agent.asked == []


def test_when_entering_again_brings_no_step_all_ranks_are_ended() -> None:
    agent = Agent()
    for number in range(MOST_FRUITLESS - 1):
        agent.begin_round(6 + number, kept=2)
        assert agent.parts.begin(agent.local)
        agent.leaves(0, 1, 2)
        agent.after(0.0)
    agent.begin_round(8, kept=2)
    assert not agent.parts.begin(agent.local)
    agent.begin_round(9, kept=2)
    assert agent.parts.begin(agent.local), "after that it is tried again"


def test_with_steps_in_between_there_is_no_end_of_it() -> None:
    agent = Agent()
    for number in range(9):
        agent.begin_round(6 + number, kept=3, steps=True)
        assert agent.parts.begin(agent.local)
        agent.leaves(0, 1, 2)
        assert agent.after(0.0) == {0, 1, 2}


def test_nothing_is_kept_of_ranks_that_are_being_ended_otherwise() -> None:
    agent = Agent()
    agent.parts.begin(agent.local)
    agent.leaves(0, 1, 2)
    agent.ranks.local = None
    assert agent.after(0.1) is None
    assert agent.after(LEAVE_S) is None


def test_a_kept_rank_that_does_not_enter_has_failed_and_one_that_has_not_yet() -> None:
    agent = Agent()
    agent.begin_round(6, kept=3)
    agent.says(0, rank_link.Attach(0, 0, 6, 100))
    agent.local.exited(2, 1, None, 0.0, ("", ""))
    agent.local.failed = False  # as if its end were no failure
    agent.after(0.0)
    agent.after(ENTER_S - 0.1)
    assert agent.failed == []
    agent.after(0.2)
    agent.after(ENTER_S)
    assert [rank for rank, _ in agent.failed] == [1], "once, and not of those that came or ended"


def test_a_rank_that_was_restored_later_has_as_long_from_then_on() -> None:
    agent = Agent()
    agent.begin_round(6, kept=1)
    agent.says(0, rank_link.Attach(0, 0, 6, 100))
    agent.after(0.0)
    agent.after(2 * ENTER_S)
    agent.local.ranks[1].is_kept = True  # its process is there now, from an image
    agent.after(0.0)
    agent.after(ENTER_S - 0.1)
    assert agent.failed == []
    agent.after(0.2)
    assert [rank for rank, _ in agent.failed] == [1]


def test_new_processes_may_take_longer_to_attach() -> None:
    agent = Agent()
    agent.begin_round(6, kept=1)
    agent.says(0, rank_link.Attach(0, 0, 6, 100))
    agent.after(0.0)
    agent.after(10 * ENTER_S)
    agent.begin_round(7)
    agent.after(10 * ENTER_S)
    assert agent.failed == []


# -- the processes ---------------------------------------------------------------------------------------------------


class Server:
    """The agent's end of the links: notes what is sent, and to which process."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, rank_link.AgentMessage]] = []
        self.reaches = True

    def tell_process(self, pid: int, message: rank_link.AgentMessage) -> bool:
        self.sent.append((pid, message))
        return self.reaches


def command(local_rank: int, **env: str) -> RankCommand:
    env = {"RESILIO_RESTORE": "memory:4"} | env
    return RankCommand(local_rank, ("t.py",), "script", env, "/", f"/out/{local_rank}", f"/err/{local_rank}")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    killed: list[int] = []
    monkeypatch.setattr(
        "resilio_hpc.launch.workers.rank_reentry.process_tree.send", lambda pids, number: killed.extend(pids)
    )
    monkeypatch.setattr("resilio_hpc.launch.workers.rank_reentry.process_tree.descendants", lambda pid: [])
    pids = {0: 100, 1: 101}
    server: Any = Server()
    parts = RankReentry(server, pids)
    for rank in (0, 1):
        assert not parts.enter(command(rank, RANK=str(rank), RESILIO_ROUND="1"))
    parts.end_others()
    assert killed == []
    return SimpleNamespace(parts=parts, pids=pids, server=server, killed=killed)


def test_a_kept_process_gets_its_place_by_message(processes: Any) -> None:
    assert processes.parts.keep({1}) == (101,)
    processes.parts.others_ended()
    assert processes.pids == {1: 101}
    assert not processes.parts.enter(command(0, RANK="0", RESILIO_ROUND="2"))
    assert processes.parts.enter(command(1, RANK="1", RESILIO_ROUND="2"))
    ((pid, message),) = processes.server.sent
    env = {"RESILIO_RESTORE": "memory:4", "RANK": "1", "RESILIO_ROUND": "2"}
    assert (pid, message) == (101, rank_link.EnterRound(env, "/out/1", "/err/1"))
    processes.parts.end_others()
    assert processes.killed == [] and processes.pids == {1: 101}


@pytest.mark.parametrize(
    "env",
    [
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"LD_PRELOAD": "/x.so"},
        {"LOCAL_RANK": "0"},
        {"PYTORCH_ALLOC_CONF": "a"},
        {"RESILIO_RESTORE": ""},
    ],
)
def test_what_a_process_reads_once_needs_another_one_and_so_does_a_beginning(
    processes: Any, env: dict[str, str]
) -> None:
    processes.parts.keep({0, 1})
    assert processes.parts.enter(command(0, RANK="0"))
    assert not processes.parts.enter(command(1, RANK="1", **env))
    processes.parts.end_others()
    assert processes.killed == [101]
    assert processes.pids == {0: 100}
    assert processes.parts.was_ended(101) and not processes.parts.was_ended(101)


def test_a_process_that_is_gone_or_takes_no_message_is_replaced(processes: Any) -> None:
    processes.parts.keep({0, 1})
    del processes.pids[0]  # it has ended meanwhile
    assert not processes.parts.enter(command(0))
    processes.server.reaches = False
    assert not processes.parts.enter(command(1))
    processes.parts.end_others()
    assert processes.killed == [101]


@pytest.mark.parametrize("reaches", [True, False])
def test_a_standby_process_takes_the_place_of_one_that_is_gone_or_is_ended_itself(
    processes: Any, reaches: bool
) -> None:
    parts = RankReentry(processes.server, processes.pids, standby=lambda _: 200)
    processes.pids.clear()
    processes.server.reaches = reaches
    assert parts.enter(command(1, RANK="1")) is reaches
    assert [pid for pid, _ in processes.server.sent] == [200]
    assert processes.pids == ({1: 200} if reaches else {})
    assert processes.killed == ([] if reaches else [200])
    assert parts.was_ended(200) is not reaches, "its end is no failure of the rank"
