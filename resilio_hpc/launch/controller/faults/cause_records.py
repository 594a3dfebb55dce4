"""What the ledger gets about what ended a round, once all its failures are known. Pure."""

from __future__ import annotations

from typing import Any

from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.recovery import Recovery, fields_of, origin_fields
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.protocol.message_parts import Cause


def tell_cause(run: RunState, out: Outbox, recovery: Recovery, cause: Cause | None) -> None:
    """Record the origin where it reads like an echo, so that it was not announced, and how many echoes it had."""
    failed = recovery.last_failure()
    number = run.round - 1
    found = recovery.last_origin(run.world_size)
    if found is not None and found[1] > 1:
        out.record("origin", round=number, **origin_fields(*found))
    if cause is None:
        return
    if cause.reads_like_echo and failed is not None:
        out.record("first_failure", round=number, **fields_of(failed))
    count = sum(agent.echoes for agent in run.agents.values()) - cause.reads_like_echo
    if count > 0:
        known: dict[str, Any] = {"rank": cause.rank} if cause.rank >= 0 else {}
        if cause.reads_like_echo:
            known["echo"] = True
        out.record("echoes", round=number, node=cause.node, **known, count=count, logs=run.config.logs)
