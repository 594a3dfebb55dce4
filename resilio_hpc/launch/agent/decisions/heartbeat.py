"""What an agent's Heartbeat says, and how often it is sent. Pure."""

from __future__ import annotations

from functools import lru_cache

from resilio_hpc.launch.agent.decisions.agent_ports import Ports
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.protocol import messages as m

BEATS_PER_TIMEOUT = 8  # of one agent; thousands of agents send fewer, so that their controller has time for other work
FEWEST_BEATS_PER_TIMEOUT = 5
BEATS_PER_S = 4000  # of all agents of a job together


@lru_cache(maxsize=16)  # called at every tick
def beat_interval_s(heartbeat_timeout_s: float, agents: int) -> float:
    """Return the seconds between two Heartbeats of one agent, in a job of ``agents`` agents."""
    often, seldom = heartbeat_timeout_s / BEATS_PER_TIMEOUT, heartbeat_timeout_s / FEWEST_BEATS_PER_TIMEOUT
    return min(1.0, max(often, min(seldom, agents / BEATS_PER_S)))


def heartbeat(ranks: NodeRanks, ports: Ports, incarnation: str, echo: float, echoed_at: float) -> m.Heartbeat:
    """Return the Heartbeat of this moment. ``echo``: the controller's newest stamp, which came at ``echoed_at``."""
    local, services = ranks.local, ports.services
    begun = services.calls() if ranks.alive else -1
    port, now, unix = services.copy_port(), ports.monotonic(), ports.unix()
    age_s = max(0.0, now - echoed_at)
    level, memory = services.memory()
    if local is None:
        return m.Heartbeat(
            ranks.node, incarnation, ranks.epoch, now, -1, echo, -1, 0.0, ranks.ready, port, calls=begun,
            memory_level=level, memory=memory, unix=unix, echo_age_s=age_s,
        )  # fmt: skip
    return m.Heartbeat(
        ranks.node, incarnation, ranks.epoch, now, local.number, echo, local.step, local.step_time, ranks.ready, port,
        local.has_attached, local.finishing, begun, local.section, level, memory, unix, age_s,
    )  # fmt: skip
