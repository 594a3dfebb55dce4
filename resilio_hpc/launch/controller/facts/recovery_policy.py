"""The recovery ladder: one pure decision from what failed and what is left to what is done (RES-5, OEU-1, DLR-1).

Rungs, lowest first: restart the ranks where they were → replace a lost node by a spare → go on with fewer nodes →
wait for a node that may still come → let the next job of the chain carry on → stop with a verdict. A higher rung is
taken only when a lower one cannot help. Restarts that do not advance the last durable step are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from resilio_hpc.events.rungs import Rung
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts


class Failure(Struct, frozen=True):
    """What failed. ``lost``: names of lost nodes; empty when only processes failed.

    ``moves``: why the ranks of ``faulty`` should go to another node.
    """

    lost_nodes: tuple[str, ...] = ()
    faulty: str = ""
    moves: str = ""


@dataclass(frozen=True)
class World:
    """The nodes that are left.

    ``members``: nodes of the failed round; ``available``: usable connected nodes, spares included; ``coming``: nodes
    that may still appear; ``returning``: members among them whose agent is being restarted; ``just_lost``: nodes that
    may be back soon, since an agent that was killed on a busy node takes its time. ``sound``: of the available ones,
    those without a known fault.
    """

    members: int
    available: int
    coming: int
    shape: NodeCounts
    returning: int = 0
    just_lost: int = 0
    sound: int = 0


class Budgets(Struct, frozen=True):
    """Limits of restarts. ``without_progress``: restarts since the durable step last advanced, this one included."""

    without_progress: int
    max_without_progress: int
    chained: bool = False


class RecoveryPlan(Struct, frozen=True):
    """The decision, and its reason as text."""

    rung: Rung
    reason: str


def decide(failure: Failure, world: World, budgets: Budgets) -> RecoveryPlan:
    """Return the lowest rung that can help."""
    if budgets.without_progress > budgets.max_without_progress:
        return RecoveryPlan(
            Rung.STOP,
            f"{budgets.without_progress - 1} restarts did not advance the last durable step (--max-restarts "
            f"{budgets.max_without_progress})",
        )
    # a rank returns to the node that holds its snapshot (RES-11); a lost node would be silent by now
    if world.returning:
        return RecoveryPlan(Rung.WAIT, "agents of the last round are not back yet")
    possible = world.shape.trim(world.available)
    if not failure.lost_nodes and possible >= world.members:
        if not failure.faulty:
            return RecoveryPlan(Rung.RESTART, "the nodes are fine")
        what = f"{failure.faulty} is at fault: {failure.moves}"
        if world.shape.trim(world.sound) >= world.members:
            return RecoveryPlan(Rung.REPLACE, f"{what}; a spare takes its place")
        return RecoveryPlan(Rung.RESTART, f"{what}; no spare is left")
    lost = ", ".join(failure.lost_nodes) or "a node"
    if possible >= world.members:
        return RecoveryPlan(Rung.REPLACE, f"{lost} lost, a spare takes its place")
    if world.shape.trim(world.available + world.coming) > possible:
        return RecoveryPlan(Rung.WAIT, f"{lost} lost or restarting, {world.coming} node(s) may still come")
    if possible:
        return RecoveryPlan(Rung.SHRINK, f"{lost} lost, no spare: {possible} of {world.members} nodes go on")
    if world.shape.trim(world.available + world.coming + world.just_lost):
        return RecoveryPlan(Rung.WAIT, f"{lost} lost, and too few nodes without it: it may come back")
    why = f"{world.available} usable node(s) left, at least {world.shape.minimum} needed"
    return RecoveryPlan(Rung.NEXT_JOB if budgets.chained else Rung.STOP, why)
