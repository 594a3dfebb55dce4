"""What ``status.json`` says: the run as its controller sees it now."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from resilio_hpc.core.wire import Counters
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.protocol import messages as m


def status(controller: Controller, pulse: int, counters: Counters) -> dict[str, Any]:
    """As JSON values. ``pulse`` moves while the controller leads."""
    now = time.monotonic()
    return {
        "v": 1,  # pulse and epoch come first: see run_directory.read_pulse
        "pulse": pulse,
        "epoch": controller.epoch,
        "time": time.time(),
        "controller": controller.node,
        "phase": controller.phase,
        "round": controller.round,
        "restarts": controller.restarts,
        "without_progress": controller.without_progress,
        "committed": controller.checkpoints.committed,
        "members": _members(controller.members),
        "agents": {
            node: {
                "silent_s": round(now - agent.heard, 2),
                "step": agent.step,
                "step_s": agent.step_time,
                "held": sorted({held.step for held in agent.held}),
            }
            for node, agent in controller.agents.items()
        },
        "lost": sorted(controller.lost),
        "refused": asdict(counters),
    }


@lru_cache(maxsize=2)
def _members(members: tuple[m.Member, ...]) -> list[dict[str, Any]]:
    return [{field: getattr(member, field) for field in member.__struct_fields__} for member in members]
