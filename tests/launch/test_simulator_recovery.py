"""One node loses power, on any day: the others go on soon after the heartbeat timeout, also without its controller."""

from __future__ import annotations

from random import Random

import pytest
from simulator.faults import strike
from simulator.schedule import Fault, Schedule
from simulator.world import SeededWorld
from virtual_cluster.ranks import Script

SEEDS = 400
AFTER_S = 3.0  # the heartbeat timeout, all ranks have done a step
MOST_EVENTS = 1_000_000


def loss(seed: int) -> Schedule:
    """One of the nodes dies while the run trains; a spare takes its place, or one node less is enough."""
    draw = Random(seed)
    nodes, spares = draw.choice((2, 3, 4)), draw.choice((0, 1))
    victim = f"n{draw.randint(1, nodes)}"
    fault = Fault(at=draw.uniform(3.0, 6.0), kind="power_cut", nodes=(victim,))
    script = Script(steps=1000, step_s=0.1, save_every=5)
    timeout_s = draw.choice((2.0, 3.0, 5.0))
    minimum = nodes if spares else nodes - 1
    return Schedule(seed, nodes, spares, 1, minimum, 1, script, timeout_s, 8, False, True, (fault,))


def recovery_s(plan: Schedule) -> float | None:
    """From the loss to the next round's first step; None where the node took no part."""
    world = SeededWorld(plan)
    (fault,) = plan.faults
    world.advance(world.now + fault.at, MOST_EVENTS)
    if not set(fault.nodes) & set(world.records("round")[-1]["members"]):
        return None
    lost_at = world.now
    strike(world, fault)
    while not (again := [at for at in world.times("first_step") if at > lost_at]):
        assert world.now < lost_at + 60.0, f"seed {plan.seed}: it does not go on"
        world.advance(world.now + 0.1, MOST_EVENTS)
    return again[0] - lost_at


def test_the_others_go_on_soon_after_the_heartbeat_timeout() -> None:
    taken = {plan: seconds for plan in map(loss, range(SEEDS)) if (seconds := recovery_s(plan)) is not None}
    assert len(taken) > SEEDS / 2
    late = {
        plan.seed: round(seconds - plan.heartbeat_timeout_s, 2)
        for plan, seconds in taken.items()
        if seconds > plan.heartbeat_timeout_s + AFTER_S
    }
    assert late == {}


def test_that_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that, having voted, runs after its dead controller because of the first pulse that it reads."""
    from resilio_hpc.launch.succession import Succession

    scanned = Succession.scanned

    def eager(self: Succession, record: object, pulse: int | None, now: float) -> None:
        if self._pulse[1] is None:
            self._pulse = (self._pulse[0], -1)
        scanned(self, record, pulse, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Succession, "scanned", eager)
    times = [(plan, recovery_s(plan)) for plan in map(loss, range(SEEDS))]
    assert any(seconds is not None and seconds > plan.heartbeat_timeout_s + AFTER_S for plan, seconds in times)
