"""The contents of ``status.json``: the run as its controller sees it now."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from resilio_hpc.core.wire import Counters
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.protocol import messages as m


def status(
    run: RunState, pulse: int, counters: Counters, stalled_s: float | None = None,
    slow: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return JSON values. ``pulse`` moves while the controller leads; ``stalled_s``: too long without a step.

    ``slow``: what was told of slow ranks, and is not over.
    """
    now = time.monotonic()
    return {
        "v": 1,  # epoch and pulse come first: see run_directory.read_pulse
        "pulse": pulse,
        "epoch": run.epoch,
        "time": time.time(),
        "controller": run.node,
        "phase": run.phase,
        "round": run.round,
        "restarts": run.restarts,
        "without_progress": run.without_progress,
        "committed": run.committed,
        "members": _members(run.members),
        "agents": {
            node: {
                "silent_s": round(now - agent.heard, 2),
                "step": agent.step,
                "step_s": agent.step_time,
                "held": sorted({held.step for held in agent.held}),
                **({"memory": agent.memory} if agent.memory_level else {}),
            }
            for node, agent in run.agents.items()
        },
        "lost": sorted(run.lost),
        "refused": asdict(counters),
        "slow": list(slow),
        "stalled_s": None if stalled_s is None else round(stalled_s, 2),
    }


@lru_cache(maxsize=2)
def _members(members: tuple[m.Member, ...]) -> list[dict[str, Any]]:
    return [{field: getattr(member, field) for field in member.__struct_fields__} for member in members]
