"""Goodput is progress: a hang of 72 s in a run of 86 s leaves at most a fifth, whatever became of the hang."""

from __future__ import annotations

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.goodput import goodput
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World


def run_of_86_s(until_s: float = 72.0, **options: object) -> list[Event]:
    """The ledger of a run in which a rank is stopped after 9 s, for so long."""
    world = World(nodes=2, script=Script(steps=100_000), **options)
    began = world.now
    world.run(limit_s=9.0)
    world.life.absent.add(1)
    world.run(limit_s=until_s)
    world.life.absent.clear()
    world.run(limit_s=86.0 - (world.now - began))
    told = [Event(at, "7-n1", kind, fields) for at, kind, fields in world.ledger]
    return [Event(began, "7-supervisor", "launch", {"job": "7"}), *told, Event(world.now, "7-n1", "launch_ends", {})]


@pytest.mark.parametrize("options", [{}, {"hang_timeout_s": 71.0}, {"hang_timeout_s": 0.0}], ids=str)
def test_a_hang_is_no_progress(options: dict[str, float]) -> None:
    found = goodput(run_of_86_s(**options))
    assert found.total_s == pytest.approx(86.0)
    assert found.stalled_s > 69.0
    assert found.share is not None
    assert found.share <= 0.2


def test_the_same_run_without_a_hang_makes_progress() -> None:
    found = goodput(run_of_86_s(until_s=0.0))
    assert found.share is not None
    assert found.share > 0.9
