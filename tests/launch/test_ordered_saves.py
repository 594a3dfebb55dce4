"""A checkpoint that a user orders: the step that ranks are told, and what is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.events.event_text import words
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.checkpoints.ordered_saves import (
    AHEAD_S,
    LIMIT_S,
    MARGIN_STEPS,
    SAVE_S,
    TRIES,
    OrderedSaves,
)
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.world import World


class Controller:
    """What an order needs of a controller: two nodes that train, a second a step."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, m.SaveAtStep]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.begun: set[int] = set()
        self.run: Any = SimpleNamespace(
            config=SimpleNamespace(mode=Mode.RECOVER), stopping=False, phase=Phase.RUNNING, steps_reported=True,
            leads=True, max_step=100, committed=90, epoch=1, round=3, now=lambda: self.now,
            members=[SimpleNamespace(node="n1"), SimpleNamespace(node="n2")],
            agents={"n1": SimpleNamespace(step_time=1.0), "n2": SimpleNamespace(step_time=0.9)},
        )  # fmt: skip
        self.now = 1000.0
        out: Any = SimpleNamespace(
            send=lambda node, message: self.sent.append((node, message)),
            record=lambda kind, **fields: self.events.append((kind, fields)),
        )
        self.saves = OrderedSaves(self.run, out, self.begun.__contains__)

    def steps(self) -> list[int]:
        """Return the steps that both nodes were told."""
        assert [node for node, _ in self.sent] == ["n1", "n2"] * (len(self.sent) // 2)
        return [message.step for _, message in self.sent[::2]]

    def made(self) -> dict[str, Any]:
        (found,) = [fields for kind, fields in self.events if kind == "checkpoint_made"]
        return found


@pytest.fixture
def controller() -> Controller:
    made = Controller()
    made.saves.begin("mark", "me")
    return made


FIRST = 100 + MARGIN_STEPS + int(AHEAD_S)


def test_all_ranks_are_told_a_step_ahead_and_its_commit_is_the_answer(controller: Controller) -> None:
    assert controller.steps() == [FIRST]
    assert controller.sent[0][1] == m.SaveAtStep(1, 3, FIRST)
    controller.run.max_step = FIRST + 1
    controller.begun.add(FIRST)
    controller.now += 100
    controller.saves.tick()  # it is being written
    assert controller.steps() == [FIRST]
    controller.run.committed = FIRST
    controller.saves.tick()
    made = controller.made()
    assert (made["step"], made["asked"], made["by"], made["seconds"], made["why"]) == (FIRST, "mark", "me", 100.0, "")
    assert words("checkpoint_made", made) == (
        f"the checkpoint that was ordered is committed: step {FIRST}, after 1 min 40 s"
    )
    controller.saves.tick()
    controller.made()  # once


def test_any_later_step_serves(controller: Controller) -> None:
    controller.run.committed = 101
    controller.saves.tick()
    assert controller.made()["step"] == 101


def test_where_a_rank_was_past_the_step_later_ones_are_named(controller: Controller) -> None:
    for _ in range(TRIES - 1):
        controller.run.max_step = controller.steps()[-1] + 1
        controller.saves.tick()
        assert len(controller.steps()) == len(set(controller.steps()))
        controller.now += SAVE_S + 0.1
        controller.saves.tick()
    ahead = [step - before for before, step in zip(controller.steps(), controller.steps()[1:], strict=False)]
    assert len(controller.steps()) == TRIES
    assert ahead == sorted(ahead)
    controller.run.max_step = controller.steps()[-1] + 1
    controller.saves.tick()
    controller.now += SAVE_S + 0.1
    controller.saves.tick()
    assert "ranks did not save" in controller.made()["why"]


def test_a_restart_names_a_step_of_the_new_round(controller: Controller) -> None:
    controller.run.phase, controller.run.round = Phase.PREPARING, 4
    controller.saves.tick()
    assert len(controller.steps()) == 1
    controller.run.phase, controller.run.max_step = Phase.RUNNING, 95
    controller.saves.tick()
    assert controller.sent[-1][1] == m.SaveAtStep(1, 4, FIRST - 5)


def test_a_second_order_meanwhile_is_refused_and_the_first_goes_on(controller: Controller) -> None:
    controller.saves.begin("other", "you")
    assert (controller.made()["asked"], controller.made()["why"]) == ("other", "another order is being carried out")
    controller.run.committed = 200
    controller.saves.tick()
    assert [fields["asked"] for kind, fields in controller.events if kind == "checkpoint_made"] == ["other", "mark"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps_reported": False}, "reports no steps"),
        ({"stopping": True}, "the run stops"),
        ({"config": SimpleNamespace(mode=Mode.OBSERVE)}, "--mode observe"),
    ],
)
def test_what_is_not_possible_is_said_at_once(change: dict[str, Any], why: str) -> None:
    controller = Controller()
    vars(controller.run).update(change)
    controller.saves.begin("mark", "me")
    assert why in controller.made()["why"]
    assert controller.sent == []


def test_an_order_does_not_last_for_ever(controller: Controller) -> None:
    controller.now += LIMIT_S + 1
    controller.saves.tick()
    assert "within" in controller.made()["why"]


def test_an_order_is_carried_out_in_a_virtual_cluster() -> None:
    world = World(nodes=3)
    world.until_step(25)
    world.controller.checkpoints.ordered.begin("mark", "me")
    world.run(lambda: world.records("checkpoint_made") != [])
    (made,) = world.records("checkpoint_made")
    assert made["why"] == ""
    assert made["step"] > 20
