"""One fault on any day: the others train again soon after the heartbeat timeout, whoever was their controller."""

from __future__ import annotations

from random import Random

import pytest

from resilio_hpc.launch.consensus.follower import Succession
from resilio_hpc.launch.protocol.vote import EpochRecord
from tests.support.simulator.faults import strike
from tests.support.simulator.schedule import Fault, Schedule
from tests.support.simulator.world import SeededWorld
from tests.support.virtual_cluster.ranks import Script

SEEDS = 200
AFTER_S = 3.2  # the heartbeat timeout, all ranks have done a step; a heartbeat on its way at the fault still counts
LASTS_S = 100.0
MOST_EVENTS = 1_000_000


def loss(seed: int, kind: str) -> Schedule:
    """A node is lost, or half of them: a spare takes its place, or those that are left are enough."""
    draw = Random(seed)
    nodes, spares = (4, 0) if kind == "halves" else (draw.choice((2, 3, 4)), draw.choice((0, 1)))
    names = [f"n{number}" for number in range(1, nodes + 1)]
    lost = tuple(draw.sample(names, 2 if kind == "halves" else 1))
    fault = Fault(draw.uniform(3.0, 6.0), kind, lost, 0.0 if kind == "power_cut" else LASTS_S)
    script = Script(steps=1000, step_s=0.1, save_every=5)
    minimum = nodes if spares else nodes - len(lost)
    timeout_s = draw.choice((2.0, 3.0, 5.0))
    return Schedule(seed, nodes, spares, 1, minimum, 1, script, timeout_s, 8, False, True, (fault,))


def recovery_s(plan: Schedule) -> float | None:
    """From the fault to the next round's first step; None where it strikes nobody who takes part."""
    world = SeededWorld(plan)
    (fault,) = plan.faults
    world.advance(world.now + fault.at, MOST_EVENTS)
    if not set(fault.nodes) & set(world.records("round")[-1]["members"]):
        return None
    lost_at = world.now
    strike(world, fault)
    while not (again := [at for at in world.times("first_step") if at > lost_at]):
        assert world.now < lost_at + LASTS_S / 2, f"seed {plan.seed}: it does not go on"
        world.advance(world.now + 0.1, MOST_EVENTS)
    return again[0] - lost_at


def late(kind: str, seeds: int) -> tuple[dict[int, float], int]:
    """Seeds that took too long and how long after the timeout; and how many were measured."""
    plans = [loss(seed, kind) for seed in range(seeds)]
    after_s = {plan.seed: took - plan.heartbeat_timeout_s for plan in plans if (took := recovery_s(plan)) is not None}
    return {seed: round(seconds, 2) for seed, seconds in after_s.items() if seconds > AFTER_S}, len(after_s)


@pytest.mark.parametrize("seeds", [SEEDS // 2, pytest.param(5 * SEEDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["power_cut", "node_alone", "frozen", "halves"])
def test_the_others_go_on_soon_after_the_heartbeat_timeout(kind: str, seeds: int) -> None:
    too_late, measured = late(kind, seeds)
    assert too_late == {}
    assert measured > 0.9 * seeds


def test_whoever_takes_the_first_pulse_that_it_reads_for_a_new_one_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Having voted, it runs after its dead controller."""
    scanned = Succession.scanned

    def eager(self: Succession, record: EpochRecord | None, pulse: int | None, now: float) -> None:
        if self._scans._pulse[1] is None:
            self._scans._pulse = (self._scans._pulse[0], -1)
        scanned(self, record, pulse, now)

    monkeypatch.setattr(Succession, "scanned", eager)
    assert late("power_cut", SEEDS)[0]
