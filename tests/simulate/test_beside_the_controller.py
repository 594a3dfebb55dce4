"""Simulated runs beside the real controller and agents, which exchange messages in virtual time: the same faults."""

from __future__ import annotations

from collections import Counter

import pytest

from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate.constants import SourceKind, defaults
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.fleets import FaultKind
from resilio_hpc.simulate.rank_failures import rank_failure
from resilio_hpc.simulate.recovering_run import RecoveringRun
from resilio_hpc.simulate.virtual_run import SimulatedSetup
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

NODES, EVERY, STEP_S, START_S = 4, 30, 1.0, 0.3
Story = tuple[tuple[float, FaultKind, int], ...]  # seconds, what, node rank

BUG, GPU, NODE = FaultKind.PROCESS, FaultKind.DEVICE, FaultKind.NODE
STORIES: dict[str, Story] = {
    "a bug": ((100.5, BUG, 1),),
    "a GPU": ((100.5, GPU, 1),),
    "a node": ((100.5, NODE, 2),),
    "more nodes than spares": ((100.5, NODE, 2), (200.5, NODE, 1), (300.5, NODE, 1)),
    "more GPUs than spares": ((100.5, GPU, 2), (200.5, GPU, 1), (300.5, GPU, 1)),
    "all kinds": ((70.5, BUG, 1), (140.5, NODE, 2), (210.5, GPU, 0), (280.5, NODE, 1)),
    "nodes one after the other": tuple((73.5 + 60 * number, NODE, 1) for number in range(4)),
}


def strike(world: World, what: FaultKind, place: int) -> None:
    members = world.last.state.members
    if place >= len(members):
        return
    if what is NODE:
        world.power_off(members[place].node)
        return
    said = rank_failure(what, members[place].node, place, 0.0, int(world.now))
    world.fail_rank(place, exit_code=said.exit_code, signal=said.signal, message=said.message or said.log,
                    traceback=said.traceback)  # fmt: skip


def real(story: Story, spares: int, minimum: int, copies: bool) -> tuple[Counter[str], int, str]:
    """Rungs, steps that were made again, and the verdict."""
    world = World(NODES, spares, 1, Script(10**6, STEP_S, EVERY, start_s=START_S), minimum, chained=True)
    world.copy_port = int(copies)
    world.until_step(1)
    began = world.now
    for at, what, place in story:
        world.run(None, began + at - world.now)
        if world.directory.verdict is None:
            strike(world, what, place)
    world.run(None, 60.0)
    rungs = Counter(str(fields["rung"]) for fields in world.records("decision") if fields["rung"] != "wait_for_node")
    again = sum(fields["lost_steps"] or 0 for fields in world.records("recovered"))
    return rungs, again, str((world.directory.verdict or {}).get("verdict", ""))


def simulated(story: Story, spares: int, minimum: int, copies: bool) -> tuple[Counter[str], int, str]:
    """The same of the simulator."""
    given = {
        "launch_s": 0.0, "program_start_s": START_S, "communicators_s_per_gpu": 0.0, "round_s_per_node": 0.0,
        "gb_per_gpu": 1e-6, "step_s": STEP_S, "silent_node_s": 0.0, "queue_s": 1e9, "store_gb_s": 5e-6,
    }  # fmt: skip
    setup = SimulatedSetup(
        NODES, 1, story[-1][0] + 60.0, spares, minimum, EVERY * STEP_S, copies, last_step=False, chained=True
    )  # fmt: skip
    faults = [SimulatedFault(round((at + START_S) * 1e6), what, (place,), False, 10**12) for at, what, place in story]
    run = RecoveringRun(setup, defaults().replaced(given, SourceKind.GIVEN, "a test"), faults)
    found = run.result()
    rungs = Counter({
        name: found.counts[name] for name in ("restart_ranks", "replace_node", "shrink", "next_job", "stop")
        if name in found.counts
    })  # fmt: skip
    verdict = next((name.partition(" ")[2] for name in found.counts if name.startswith("verdict")), "")
    return rungs, round(found.by_cause[TimeCause.REPEATED] / 1e6 / STEP_S), verdict


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(("spares", "minimum"), [(0, 4), (1, 4), (1, 2), (3, 1)])
@pytest.mark.parametrize("name", STORIES)
def test_the_real_controller_decides_the_same(name: str, spares: int, minimum: int, copies: bool) -> None:
    story = STORIES[name]
    told, found = real(story, spares, minimum, copies), simulated(story, spares, minimum, copies)
    assert (found[0], found[2]) == (told[0], told[2])
    assert abs(found[1] - told[1]) <= 2 * len(story)  # a step is under way at each fault
