"""What strikes, and how it passes. ``value`` is between 0 and 1 and picks among variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from virtual_cluster.agent import VirtualAgent

from simulator.network import Bad
from simulator.schedule import Fault
from simulator.world import SeededWorld

BAD = (
    Bad(delay_s=0.5), Bad(delay_s=3.0), Bad(overtaking=True, delay_s=1.0), Bad(lost=0.1), Bad(doubled=0.5),
    Bad(doubled=0.3, overtaking=True, delay_s=2.0), Bad(lost=0.3, doubled=0.2, overtaking=True, delay_s=1.0),
)  # fmt: skip


def strike(world: SeededWorld, fault: Fault) -> None:
    """Let it happen now, and see to it that it passes."""
    _STRIKE[fault.kind](world, fault)


def _passes(world: SeededWorld, fault: Fault, call: Callable[[], None]) -> None:
    def over() -> None:
        world.record("fault_over", {"fault": fault.kind, "nodes": fault.nodes})
        call()

    world.after(fault.lasts, over)


def _rank_dies(world: SeededWorld, fault: Fault) -> None:
    (node,) = fault.nodes
    agent = world.agents.get(node)
    if agent is not None and agent.core.local is not None and agent.lives():
        signal = 9 if fault.value < 0.5 else None
        agent.rank_ends(0, None if signal else 1, signal, "killed" if signal else "ValueError")


def _agent_killed(world: SeededWorld, fault: Fault) -> None:
    (node,) = fault.nodes
    if node in world.agents:
        world.kill_agent(node)
        world.after(0.2 + 3.0 * fault.value, lambda: _restart(world, node))


def _restart(world: SeededWorld, node: str) -> None:
    if not world.sites[node].off and node not in world.agents and world.wanted(node):
        world.start_agent(node)


def _power_cut(world: SeededWorld, fault: Fault) -> None:
    (node,) = fault.nodes
    if node in world.agents:
        world.power_off(node)
    world.sites[node].off = True


def _cut(world: SeededWorld, fault: Fault, pairs: set[tuple[str, str]]) -> None:
    ours = pairs - world.network.cuts
    world.network.cuts |= ours
    _passes(world, fault, lambda: world.network.heal(ours))


def _split(world: SeededWorld, fault: Fault) -> None:
    others = [name for name in world.sites if name not in fault.nodes]
    _cut(world, fault, {pair for one in fault.nodes for other in others for pair in ((one, other), (other, one))})


def _groups(world: SeededWorld, fault: Fault) -> None:
    """Pairs at random: what one node sees, another does not."""
    names = list(world.sites)
    pairs = [(one, other) for one in names for other in names if one < other and world.draw.random() < fault.value]
    _cut(world, fault, {pair for one, other in pairs for pair in ((one, other), (other, one))})


def _one_way(world: SeededWorld, fault: Fault) -> None:
    others = [name for name in world.sites if name not in fault.nodes]
    there = {(one, other) for one in fault.nodes for other in others}
    _cut(world, fault, there if fault.value < 0.5 else {(other, one) for one, other in there})


def _connection_breaks(world: SeededWorld, fault: Fault) -> None:
    for node in fault.nodes:
        if node in world.agents:
            world.network.break_connection(world.agents[node].connection)


def _bad_network(world: SeededWorld, fault: Fault) -> None:
    world.network.bad = BAD[int(fault.value * len(BAD))]
    _passes(world, fault, world.network.better)


def _storage_hangs(world: SeededWorld, fault: Fault) -> None:
    nodes = fault.nodes or tuple(world.sites)
    world.storage.hang(nodes)
    _passes(world, fault, lambda: world.storage.go_on(nodes))


def _storage_fails(world: SeededWorld, fault: Fault) -> None:
    _for_a_while(world, fault, world, "storage_fails")


def _for_a_while(world: SeededWorld, fault: Fault, thing: Any, name: str) -> None:
    setattr(thing, name, True)
    _passes(world, fault, lambda: setattr(thing, name, False))


def _warning(world: SeededWorld, fault: Fault) -> None:
    signal = "TERM" if fault.value < 0.6 else "USR2"

    def reach(agent: VirtualAgent) -> None:
        world.after(0.3 * world.draw.random(), lambda: agent.event(lambda: agent.core.warned(signal)))

    for agent in list(world.agents.values()):
        reach(agent)


def _saver_fails(world: SeededWorld, fault: Fault) -> None:
    failing = {(node, step) for node in fault.nodes for step in range(world.script.steps + 5)}
    world.saver_fails |= failing
    _passes(world, fault, lambda: world.saver_fails.difference_update(failing))


def _frozen(world: SeededWorld, fault: Fault) -> None:
    """Agent and ranks stand still, as in a virtual machine that is suspended."""
    (node,) = fault.nodes
    site = world.sites[node]
    if site.frozen:
        return
    site.frozen = True
    if node in world.agents:
        world.agents[node].suspend()

    def go_on() -> None:
        if node in world.agents:
            world.agents[node].resume()  # what it decides to kill makes no step any more
        world.after(site.stop_s + 0.1, lambda: setattr(site, "frozen", False))

    _passes(world, fault, go_on)


def _agent_stopped(world: SeededWorld, fault: Fault) -> None:
    (node,) = fault.nodes
    agent = world.agents.get(node)
    if agent is not None and not agent.suspended:
        agent.suspend()
        _passes(world, fault, lambda: agent.resume() if agent.suspended and not world.sites[node].frozen else None)


def _clock_jumps(world: SeededWorld, fault: Fault) -> None:
    for node in fault.nodes:
        world.sites[node].unix_offset_s += (fault.value - 0.5) * 7200


def _spawner_dies(world: SeededWorld, fault: Fault) -> None:
    for node in fault.nodes:
        if node in world.agents:
            world.agents[node].event(world.agents[node].spawner_dies)


def _store_dies(world: SeededWorld, fault: Fault) -> None:
    for node in fault.nodes:
        agent = world.agents.get(node)
        if agent is not None and agent.stores:
            agent.event(agent.store_dies)


def _slow_to_die(world: SeededWorld, fault: Fault) -> None:
    for node in fault.nodes:
        world.sites[node].stop_s = 0.02 + 0.04 * fault.value * world.config.heartbeat_timeout_s


_STRIKE: dict[str, Callable[[SeededWorld, Fault], None]] = {
    "rank_dies": _rank_dies, "agent_killed": _agent_killed, "power_cut": _power_cut, "node_alone": _split,
    "halves": _split, "groups": _groups, "one_way": _one_way, "connection_breaks": _connection_breaks,
    "bad_network": _bad_network, "storage_hangs": _storage_hangs, "storage_hangs_here": _storage_hangs,
    "storage_fails": _storage_fails, "warning": _warning, "saver_fails": _saver_fails, "frozen": _frozen,
    "agent_stopped": _agent_stopped, "clock_jumps": _clock_jumps, "spawner_dies": _spawner_dies,
    "store_dies": _store_dies, "slow_to_die": _slow_to_die,
}  # fmt: skip
