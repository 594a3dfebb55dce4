"""A drill of a live run: one fault that the controller has an agent do on purpose."""

from __future__ import annotations

from typing import Literal

from resilio_hpc.launch.protocol.message_parts import Count, Struct

Blow = Literal["kill_rank", "abort_rank", "stop_rank", "kill_agent"]


class DrillStrike(Struct, frozen=True):
    """controller → agent: send a signal to a rank of this round, or to this agent itself.

    It is recorded before it is sent, and sent once: where it is lost, no fault happens.
    """

    epoch: Count
    round: Count
    blow: Blow
    local_rank: Count
