"""An agent that has ranks save their last finished step: who is asked, for how long, and what follows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import rank_link
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.last_step import ANSWER_S, LIMIT_S, OTHERS_S, OWN, LastStepSaves
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from tests.support.waiting import until

POOL = ThreadPoolExecutor(1)
STATE = m.RoundState(1, 5, m.world_of((m.Member("n1", 0, "n1", 2, 0),)), 0, 0, ())


class Agent:
    """Two ranks of one node in round 5, which have saved step 3."""

    def __init__(self, path: Path, shared: bool = True) -> None:
        self.path = path
        self.arenas = path / "arenas"
        self.arenas.mkdir()
        self.local = LocalRound("n1", STATE, m.Member("n1", 0, "n1", 2, 0), None)
        self.events: list[dict[str, Any]] = []
        self.asked: list[int] = []
        self.told: list[rank_link.AgentMessage] = []
        self.over = 0
        self.others: list[int] = []
        self.now = 100.0
        context: Any = SimpleNamespace(
            arena_dir=self.arenas,
            local_dir=path,
            record=lambda kind, **fields: self.events.append({"e": kind} | fields),
        )
        self.ranks: Any = SimpleNamespace(local=self.local, last_step_saved=self.ends)
        self.saves = LastStepSaves(context, self.ranks, self.tell, self.make_lost, lambda: self.now)
        for rank in (0, 1):
            self.says(rank, rank_link.HoldsSteps(shared))
            self.snapshot(rank, 3)

    def tell(self, rank: int, message: rank_link.AgentMessage) -> None:
        self.told.append(message)
        assert isinstance(message, rank_link.SaveLastStep)
        self.asked.append(rank)

    def make_lost(self, step: int, then: Callable[[], None]) -> None:
        self.others.append(step)
        then()

    def ends(self) -> None:
        self.over += 1

    def says(self, rank: int, message: rank_link.RankMessage) -> None:
        self.local.said(rank, message, self.now)

    def snapshot(self, rank: int, step: int) -> None:
        pair = ArenaPair(self.arenas, Owner(rank, rank, 2, 2, 5, "replicated", "run"), self.path / "spill")
        Snapshot(pair, step, flatten({"w": np.full(9, step), "rank": rank}), POOL).finish()

    def record(self, rank: int, step: int) -> None:
        RecordWriter(self.arenas, rank, 2, 5).write(step, own_part({"w": np.full(9, step), "rank": rank}), False)

    def saved(self, rank: int, step: int) -> None:
        self.snapshot(rank, step)
        self.says(rank, rank_link.LastStepSaved(step))

    def dies(self, rank: int) -> None:
        self.local.exited(rank, None, 9, 0.0, ("", ""))

    def waits(self) -> bool:
        self.saves.tick()
        return self.over == 0 and self.saves._making is None

    def ended(self) -> dict[str, Any]:
        """Its event, once ranks may be ended."""
        until(lambda: self.saves.tick() or self.over, "the end", lambda: self.events)
        assert self.over == 1
        (event,) = self.events
        return event


@pytest.fixture
def agent() -> Iterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Agent(Path(name))


def test_ranks_that_live_save_and_a_lost_ones_snapshot_is_made(agent: Agent) -> None:
    agent.record(1, 4)
    agent.dies(1)
    assert agent.saves.begin(agent.local, "shared")
    assert agent.asked == [0]
    assert agent.saves.begin(agent.local, "shared")  # the order came twice
    assert agent.asked == [0]
    assert agent.waits()
    agent.saved(0, 4)
    event = agent.ended()
    assert (event["step"], event["saved"], event["made"], event["of"], event["why"]) == (4, 1, [1], 2, "")
    assert agent.others == [4]
    assert words("last_step", event | {"node": "n1"}).startswith(
        "n1 has saved step 4, the last finished one, in 0.00 s, that of rank 1 from another rank's"
    )
    assert not agent.saves.begin(agent.local, "shared")  # once for a round


def test_a_lost_rank_whose_record_is_elsewhere_does_not_give_the_other_node_an_older_step(agent: Agent) -> None:
    agent.dies(1)
    agent.saves.begin(agent.local, "shared")
    agent.saved(0, 4)
    event = agent.ended()
    assert (event["step"], event["why"]) == (4, "another node may have the lost ranks' part")
    assert agent.others == [4]  # and not 3, of which both have snapshots


def test_a_save_ahead_of_a_leases_end_ends_nothing_and_the_rounds_end_asks_again(agent: Agent) -> None:
    agent.record(1, 4)
    assert agent.saves.begin(agent.local, "shared", ahead=True)
    assert agent.told[-1] == rank_link.SaveLastStep(True)
    agent.saved(0, 4)
    until(lambda: agent.saves.tick() or agent.over, "the end", lambda: agent.events)
    assert (agent.events[-1]["step"], agent.events[-1]["made"]) == (4, [1])
    agent.record(1, 5)  # training has gone on
    assert agent.saves.begin(agent.local, "shared")
    assert agent.told[-1] == rank_link.SaveLastStep(False)
    agent.saved(0, 5)
    until(lambda: agent.saves.tick() or agent.over > 1, "the end", lambda: agent.events)
    assert (agent.events[-1]["step"], agent.events[-1]["made"]) == (5, [1])
    assert not agent.saves.begin(agent.local, "shared", ahead=True)


def test_ranks_that_ended_by_themselves_have_saved_already(agent: Agent) -> None:
    for rank in (0, 1):
        agent.saved(rank, 4)
        agent.dies(rank)
    assert agent.saves.begin(agent.local, "shared")
    assert agent.asked == []
    assert (agent.ended()["step"], agent.events[0]["saved"]) == (4, 2)


def test_one_of_the_ranks_that_hold_the_same_is_asked_and_enough(agent: Agent) -> None:
    agent.record(1, 4)
    agent.saves.begin(agent.local, "shared")
    assert agent.asked == [0]
    assert agent.waits()
    agent.saved(0, 4)
    assert agent.ended()["made"] == [1]
    assert agent.asked == [0]


def test_the_others_are_asked_where_one_is_not_enough(agent: Agent) -> None:
    agent.saves.begin(agent.local, "shared")
    agent.saved(0, 4)  # rank 1 has left no record of step 4
    until(lambda: agent.saves.tick() or agent.asked == [0, 1], "the other one is asked")
    agent.saved(1, 4)
    assert (agent.ended()["step"], agent.events[0]["made"]) == (4, [])


def test_the_others_are_asked_where_the_first_cannot_save(agent: Agent) -> None:
    agent.record(0, 4)
    agent.saves.begin(agent.local, "shared")
    agent.says(0, rank_link.LastStepSaved(-1, "NotHeld: an optimizer's step had begun"))
    until(lambda: agent.saves.tick() or agent.asked == [0, 1], "the other one is asked")
    agent.saved(1, 4)
    assert (agent.ended()["step"], agent.events[0]["made"]) == (4, [0])


def test_the_first_that_is_asked_is_one_that_saves_already_and_else_not_one_that_raised(agent: Agent) -> None:
    agent.local.ranks[0].has_raised = True
    agent.record(0, 4)
    agent.saves.begin(agent.local, "shared")
    assert agent.asked == [1]
    agent.says(1, rank_link.SavingLastStep())
    agent.saved(1, 4)
    assert agent.ended()["made"] == [0]


def test_a_rank_that_does_not_answer_is_not_waited_for(agent: Agent) -> None:
    agent.record(0, 4)
    agent.saves.begin(agent.local, "shared")
    assert agent.waits()
    agent.now += ANSWER_S + 0.01
    until(lambda: agent.saves.tick() or agent.asked == [0, 1], "the other one is asked")
    agent.saved(1, 4)
    assert agent.ended()["made"] == [0]


def test_a_rank_that_is_saving_gets_more_time(agent: Agent) -> None:
    agent.dies(1)
    agent.saves.begin(agent.local, "shared")
    agent.says(0, rank_link.SavingLastStep())
    agent.now += LIMIT_S - 1
    assert agent.waits()
    agent.now += 1.01
    agent.arenas.joinpath("rank1.slot0").unlink()
    event = agent.ended()
    assert (event["step"], event["made"]) == (-1, [])  # there is no record
    assert words("last_step", event | {"node": "n1"}) == (
        "n1 could not save the last finished step: no rank had it, or not every one"
    )


def test_why_it_is_not_possible_is_told(agent: Agent) -> None:
    agent.saves.begin(agent.local, "shared")
    agent.says(0, rank_link.LastStepSaved(-1, "NotHeld: an optimizer's step had begun"))
    agent.dies(1)
    event = agent.ended()
    assert (event["step"], event["why"]) == (-1, "NotHeld: an optimizer's step had begun")
    assert agent.others == [3]  # what was saved before, the other node's ranks may have had later


def test_where_it_would_not_help_ranks_are_ended_at_once(agent: Agent, tmp_path: Path) -> None:
    assert not agent.saves.begin(agent.local, "none")  # the world changes
    own = Agent(tmp_path, shared=False)
    assert not own.saves.begin(own.local, "shared")  # a rank is lost, and no other has what it had
    (event,) = own.events
    assert (event["step"], event["saved"], event["why"]) == (-1, 0, OWN)
    assert not own.saves.begin(own.local, "shared")
    assert len(own.events) == 1
    assert own.saves.begin(own.local, "all")
    assert agent.saves.begin(agent.local, "shared")


def test_scripts_that_cannot_save_are_ended_at_once(agent: Agent) -> None:
    local = LocalRound("n1", STATE, m.Member("n1", 0, "n1", 2, 0), None)
    assert not agent.saves.begin(local, "all")


def test_ranks_that_are_ended_otherwise_meanwhile_are_left_alone(agent: Agent) -> None:
    agent.saves.begin(agent.local, "shared")
    agent.ranks.local = None  # the run ends, or this node's lease has
    agent.saves.tick()
    agent.now += 10 * LIMIT_S
    agent.saves.tick()
    assert (agent.over, agent.events) == (0, [])


def test_another_node_that_does_not_answer_holds_nothing_up(agent: Agent) -> None:
    calls: list[Callable[[], None]] = []
    agent.saves._make_lost = lambda step, then: calls.append(then)
    agent.saves.begin(agent.local, "shared")
    for rank in (0, 1):
        agent.saved(rank, 4)
    until(lambda: agent.saves.tick() or calls, "the question")
    agent.now += OTHERS_S + 0.01
    event = agent.ended()
    assert (event["step"], event["why"]) == (4, "the replicator does not answer")
    calls[0]()  # its answer comes late
    assert agent.over == 1
