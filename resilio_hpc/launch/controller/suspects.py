"""Nodes whose own fault ended a round: a spare stands in for them (RES-8, OEU-1). Pure."""

from __future__ import annotations

from resilio_hpc.launch.controller.repeated_failure import may_move
from resilio_hpc.launch.controller.run_state import RunState
from resilio_hpc.launch.controller.state import Phase
from resilio_hpc.launch.protocol.message_parts import RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence


def suspect(run: RunState, reported: RankFailure) -> bool:
    """Mark the node of the first failure where the node is at fault. ``reported``: the newest failure.

    Return whether the round that is being prepared should be planned again: a spare can take that node's place.
    """
    if is_consequence(reported) or not may_move(reported):
        return False  # of thousands of reports nearly all are echoes: the cascade is not judged again for each
    recovery = run.recovery
    first = recovery.first_failure if recovery is not None else None
    if recovery is None or first is None:
        return False
    recovery.moves = recovery.moves_from(run.broke_before)
    if not recovery.moves or first.node in run.suspects:
        return False
    run.suspects.add(first.node)
    sound = sum(node not in run.suspects for node in run.usable)
    enough = run.config.shape.trim(sound) >= len(run.members)
    return run.phase is Phase.PREPARING and run.is_member(first.node) and enough
