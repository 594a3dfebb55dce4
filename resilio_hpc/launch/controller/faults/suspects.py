"""Nodes whose own fault may have ended a round: a spare stands in for them, or they are tested (RES-8, OEU-1). Pure."""

from __future__ import annotations

from resilio_hpc.launch.controller.facts.repeated_failure import may_move
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.protocol.message_parts import RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence

NODE_KINDS = ("signal", "spawn", "spawner_lost", "lease_ended")  # failures that may be a node's own


DRILL_S = 120.0  # a failure on a node that a user has struck on purpose so short a time ago says nothing of the node


def doubt(run: RunState, failure: RankFailure) -> None:
    """Have all nodes tested before the next start where the round before ended on this failure's node, too."""
    if run.now() - run.drilled.get(failure.node, float("-inf")) < DRILL_S:
        return
    if failure.kind in NODE_KINDS and run.without_progress and run.cause and run.cause.node == failure.node:
        run.in_doubt.add(failure.node)


def doubt_hang(run: RunState, ranks: tuple[int, ...], certain: bool) -> None:
    """Have all nodes tested after a hang that might have ended by itself: not ``certain``. ``ranks``: to blame."""
    if certain:
        return
    blamed = {member.node for member in run.members if set(ranks) & set(member.ranks)}
    run.in_doubt |= blamed or {member.node for member in run.members}


def suspect(run: RunState, reported: RankFailure) -> bool:
    """Mark the node of the first failure where the node is at fault. ``reported``: the newest failure.

    Return whether the round that is being prepared should be planned again: a spare can take that node's place.
    """
    if is_consequence(reported) or not may_move(reported):
        return False  # of thousands of reports nearly all are echoes: the cascade is not judged again for each
    recovery = run.recovery
    first = recovery.last_failure() if recovery is not None else None
    if recovery is None or first is None:
        return False
    recovery.moves = recovery.moves_from(run.broke_before)
    if not recovery.moves or first.node in run.suspects:
        return False
    run.suspects.add(first.node)
    sound = sum(node not in run.suspects for node in run.usable)
    enough = run.config.shape.trim(sound) >= len(run.members)
    return run.phase is Phase.PREPARING and run.is_member(first.node) and enough
