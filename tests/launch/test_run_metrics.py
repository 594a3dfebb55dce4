"""What only the controller knows, as metrics: where it is, and nowhere else; times add up and begin again."""

from __future__ import annotations

from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.controller.run_metrics import PHASES, RunMetrics
from resilio_hpc.metrics.schema import PARTS
from tests.support.virtual_cluster.world import World


def test_values_of_a_run_that_trains() -> None:
    world = World(nodes=3)
    world.until_step(25)
    metrics = RunMetrics(lambda: world.now)
    controller = world.agents["n1"].host.controller
    assert controller is not None
    first = metrics.values(controller)
    assert set(first) <= set(PARTS["run"])
    assert PHASES[int(first["run_phase"])] is Phase.RUNNING
    assert (first["run_ranks"], first["run_nodes"], first["run_nodes_lost"]) == (6, 3, 0)
    assert first["run_step"] >= 15
    assert first["run_committed_step"] in (10, 20)
    began = world.now
    world.run(limit_s=2.0)
    later = metrics.values(controller)
    assert later["run_led_seconds_total"] == world.now - began
    assert later["run_stepping_seconds_total"] == later["run_led_seconds_total"]


def test_times_without_steps_do_not_count_and_another_controller_begins_again() -> None:
    world = World(nodes=3)
    world.until_step(25)
    metrics = RunMetrics(lambda: world.now)
    controller = world.agents["n1"].host.controller
    metrics.values(controller)
    world.life.absent.add(1)  # it computes, and its peers wait
    world.run(limit_s=30.0)
    stalled = metrics.values(controller)
    assert stalled["run_stalled_seconds"] > 0
    assert stalled["run_stepping_seconds_total"] < stalled["run_led_seconds_total"]
    assert metrics.values(None) == {}
    assert metrics.values(controller)["run_led_seconds_total"] == 0
