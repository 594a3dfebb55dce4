"""How often the agents of a job send Heartbeats. Pure."""

from __future__ import annotations

from functools import lru_cache

BEATS_PER_TIMEOUT = 8  # of one agent; thousands of agents send fewer, so that their controller has time for other work
FEWEST_BEATS_PER_TIMEOUT = 5
BEATS_PER_S = 4000  # of all agents of a job together


@lru_cache(maxsize=16)  # called at every tick
def beat_interval_s(heartbeat_timeout_s: float, agents: int) -> float:
    """Return the seconds between two Heartbeats of one agent, in a job of ``agents`` agents."""
    often, seldom = heartbeat_timeout_s / BEATS_PER_TIMEOUT, heartbeat_timeout_s / FEWEST_BEATS_PER_TIMEOUT
    return min(1.0, max(often, min(seldom, agents / BEATS_PER_S)))
