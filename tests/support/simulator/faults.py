"""What strikes, and how it passes. ``value`` is between 0 and 1 and picks among variants.

Each kind returns whether there was anything to strike: an agent that is gone already cannot be killed.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.simulator.network import Bad
from tests.support.simulator.schedule import Fault
from tests.support.simulator.world import SeededWorld
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.ranks import life_of

BAD = (
    Bad(delay_s=0.5), Bad(delay_s=3.0), Bad(overtaking=True, delay_s=1.0), Bad(lost=0.1), Bad(doubled=0.5),
    Bad(doubled=0.3, overtaking=True, delay_s=2.0), Bad(lost=0.3, doubled=0.2, overtaking=True, delay_s=1.0),
)  # fmt: skip

COMES_OF_IT = (  # what faults do to messages, processes and requests
    "lost", "doubled", "overtook", "delayed", "held", "hung", "failed", "done for the dead", "restart", "port taken",
    "next job", "fetched", "paused", "pause ended",
    "started alone",
    "raised", "kept", "left too late", "last save", "no last save", "made for a lost rank",
    "goes on from the last step",
)  # fmt: skip


def strike(world: SeededWorld, fault: Fault) -> None:
    """Let it happen now, and see to it that it passes."""
    if _STRIKE[fault.kind](world, fault):
        world.felt[fault.kind] += 1


def _passes(world: SeededWorld, fault: Fault, call: Callable[[], None]) -> None:
    def over() -> None:
        world.record("fault_over", {"fault": fault.kind, "nodes": fault.nodes})
        call()

    world.after(fault.lasts, over)


def _rank_dies(world: SeededWorld, fault: Fault) -> bool:
    (node,) = fault.nodes
    agent = world.agents.get(node)
    if agent is None or agent.core.ranks.local is None or not agent.lives():
        return False
    signal = 9 if fault.value < 0.5 else None
    if signal is None and agent.raises(0, "ValueError"):
        world.felt["raised"] += 1
        return True
    agent.rank_ends(0, None if signal else 1, signal, "killed" if signal else "ValueError")
    return True


def _rank_stopped(world: SeededWorld, fault: Fault) -> bool:
    (node,) = fault.nodes
    agent = world.agents.get(node)
    local = agent.core.ranks.local if agent is not None and agent.lives() else None
    if local is None:
        return False
    world.trainings[life_of(local)].stopped.add(next(iter(local.ranks.values())).rank)
    return True


def _nodes_tested(world: SeededWorld, fault: Fault) -> bool:
    """Ranks pause for a test, which may find a slow node, give no result, or take longer than it may."""
    world.slow_nodes = set(fault.nodes) if fault.value < 0.5 else set()
    world.test_fails = "planted" if 0.5 < fault.value < 0.6 else ""
    world.probers_s, world.testing_s = 3.0 * fault.value, 1000.0 if fault.value > 0.9 else fault.lasts
    world.test_nodes(replace=fault.value < 0.3)
    return bool(list(world.controllers()))


def _agent_killed(world: SeededWorld, fault: Fault) -> bool:
    (node,) = fault.nodes
    if node not in world.agents:
        return False
    world.kill_agent(node)
    world.after(0.2 + 3.0 * fault.value, lambda: _restart(world, node))
    return True


def _restart(world: SeededWorld, node: str) -> None:
    if not world.sites[node].off and node not in world.agents and world.wanted(node):
        world.start_agent(node)
        world.felt["restart"] += 1


def _power_cut(world: SeededWorld, fault: Fault) -> bool:
    (node,) = fault.nodes
    lived = node in world.agents
    if lived:
        world.power_off(node)
    world.sites[node].off = True
    return lived


def _cut(world: SeededWorld, fault: Fault, pairs: set[tuple[str, str]]) -> bool:
    ours = pairs - world.network.cuts
    world.network.cuts |= ours
    _passes(world, fault, lambda: world.network.heal(ours))
    return bool(ours)


def _split(world: SeededWorld, fault: Fault) -> bool:
    others = [name for name in world.sites if name not in fault.nodes]
    return _cut(
        world, fault, {pair for one in fault.nodes for other in others for pair in ((one, other), (other, one))}
    )


def _groups(world: SeededWorld, fault: Fault) -> bool:
    """Pairs at random: what one node sees, another does not."""
    names = list(world.sites)
    pairs = [(one, other) for one in names for other in names if one < other and world.draw.random() < fault.value]
    return _cut(world, fault, {pair for one, other in pairs for pair in ((one, other), (other, one))})


def _one_way(world: SeededWorld, fault: Fault) -> bool:
    others = [name for name in world.sites if name not in fault.nodes]
    there = {(one, other) for one in fault.nodes for other in others}
    return _cut(world, fault, there if fault.value < 0.5 else {(other, one) for one, other in there})


def _connection_breaks(world: SeededWorld, fault: Fault) -> bool:
    callers = [world.agents[node] for node in fault.nodes if node in world.agents]
    for agent in callers:
        world.network.break_connection(agent.connection)
    return bool(callers)


def _bad_network(world: SeededWorld, fault: Fault) -> bool:
    world.network.bad = BAD[int(fault.value * len(BAD))]
    _passes(world, fault, world.network.better)
    return True


def _storage_hangs(world: SeededWorld, fault: Fault) -> bool:
    nodes = fault.nodes or tuple(world.sites)
    world.storage.hang(nodes)
    _passes(world, fault, lambda: world.storage.go_on(nodes))
    return True


def _hung_and_alone(world: SeededWorld, fault: Fault) -> bool:
    """What it was about to write is written when others have gone on without it."""
    return _storage_hangs(world, fault) and _split(world, fault)


def _storage_fails(world: SeededWorld, fault: Fault) -> bool:
    world.storage_fails = True
    _passes(world, fault, lambda: setattr(world, "storage_fails", False))
    return True


def _warning(world: SeededWorld, fault: Fault) -> bool:
    signal = "TERM" if fault.value < 0.6 else "USR2"

    def reach(agent: VirtualAgent) -> None:
        world.after(0.3 * world.draw.random(), lambda: agent.event(lambda: agent.core.warned(signal)))

    for agent in list(world.agents.values()):
        reach(agent)
    return bool(world.agents)


def _saver_fails(world: SeededWorld, fault: Fault) -> bool:
    failing = {(node, step) for node in fault.nodes for step in range(world.script.steps + 5)}
    world.saver_fails |= failing
    _passes(world, fault, lambda: world.saver_fails.difference_update(failing))
    return True


def _frozen(world: SeededWorld, fault: Fault) -> bool:
    """Agent and ranks stand still, as in a virtual machine that is suspended."""
    (node,) = fault.nodes
    site = world.sites[node]
    if site.frozen or node not in world.agents:
        return False
    site.frozen = True
    world.agents[node].suspend()

    def go_on() -> None:
        if node in world.agents:
            world.agents[node].resume()  # what it decides to kill makes no step any more
        world.after(site.stop_s + 0.1, lambda: setattr(site, "frozen", False))

    _passes(world, fault, go_on)
    return True


def _agent_stopped(world: SeededWorld, fault: Fault) -> bool:
    (node,) = fault.nodes
    agent = world.agents.get(node)
    if agent is None or agent.suspended or world.sites[node].frozen:
        return False
    agent.suspend()
    _passes(world, fault, lambda: agent.resume() if agent.suspended and not world.sites[node].frozen else None)
    return True


def _clock_jumps(world: SeededWorld, fault: Fault) -> bool:
    for node in fault.nodes:
        world.sites[node].unix_offset_s += (fault.value - 0.5) * 7200
    return True


def _spawner_dies(world: SeededWorld, fault: Fault) -> bool:
    agents = [world.agents[node] for node in fault.nodes if node in world.agents]
    for agent in agents:
        agent.event(agent.spawner_dies)
    return bool(agents)


def _store_dies(world: SeededWorld, fault: Fault) -> bool:
    agents = [world.agents[node] for node in fault.nodes if node in world.agents and world.agents[node].stores]
    for agent in agents:
        agent.event(agent.store_dies)
    return bool(agents)


def _slow_to_die(world: SeededWorld, fault: Fault) -> bool:
    for node in fault.nodes:
        world.sites[node].stop_s = 0.02 + 0.04 * fault.value * world.config.heartbeat_timeout_s
    return True


def _job_ends(world: SeededWorld, fault: Fault) -> bool:
    """Slurm's word does not reach ``nodes``; there the run directory may hang as well, and does for long."""
    if not world.agents or world.directory.verdict is not None:
        return False
    world.chain.ends(fault.nodes, 0.5 + 3.0 * fault.value)
    if fault.value < 0.7:
        world.storage.hang(fault.nodes)
        world.after(fault.lasts, lambda: world.storage.go_on(fault.nodes))
    _passes(world, fault, world.chain.reaches_all)
    return True


_STRIKE: dict[str, Callable[[SeededWorld, Fault], bool]] = {
    "rank_dies": _rank_dies, "rank_stopped": _rank_stopped, "nodes_tested": _nodes_tested,
    "agent_killed": _agent_killed, "power_cut": _power_cut,
    "node_alone": _split,
    "halves": _split, "groups": _groups, "one_way": _one_way, "connection_breaks": _connection_breaks,
    "bad_network": _bad_network, "storage_hangs": _storage_hangs, "storage_hangs_here": _storage_hangs,
    "storage_fails": _storage_fails, "warning": _warning, "saver_fails": _saver_fails, "frozen": _frozen,
    "agent_stopped": _agent_stopped, "clock_jumps": _clock_jumps, "spawner_dies": _spawner_dies,
    "store_dies": _store_dies, "slow_to_die": _slow_to_die, "job_ends": _job_ends,
    "hung_and_alone": _hung_and_alone,
}  # fmt: skip
