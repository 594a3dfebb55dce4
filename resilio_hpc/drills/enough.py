"""When a drill has seen what it was made for, so that its script may end: no run is longer than it must be."""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.core.ledger import Event
from resilio_hpc.drills.judge import parts
from resilio_hpc.drills.kind import HURTS, Drill

SETTLE_S = 1.5  # of training afterwards: a second world would have time to show itself


def enough(drill: Drill, events: Sequence[Event], acts_at: Sequence[float], now: float) -> bool:
    """Whether the acts are done, and the run has come over them as it should and trained on for a while. Pure.

    ``now`` and ``acts_at`` are Unix seconds. Never for a drill that ends in another way than by completing.
    """
    asked = bool(drill.acts or drill.kinds or drill.jobs > 1)
    if not asked or drill.verdict != "completed" or len(acts_at) < len(drill.acts):
        return False
    hurt = max((at for act, at in zip(drill.acts, acts_at, strict=True) if act.do in HURTS), default=0.0)
    steps = [event for event in events if event.kind == "first_step"]
    rounds = [event for event in events if event.kind == "round"]
    if not steps or not rounds:
        return False
    newest_step, newest_round = max(steps, key=_when), max(rounds, key=_when)
    trains = newest_step.time > max(hurt, newest_round.time)
    grown = drill.world_size in (0, newest_round.fields.get("world_size"))
    settled = now - max(newest_step.time, *acts_at, 0.0) >= SETTLE_S
    told = not drill.slow or any(event.kind == "slow" and event.fields["ranks"] for event in events)
    return told and trains and grown and settled and _kind_seen(drill, events) and parts(events) >= drill.jobs


def _kind_seen(drill: Drill, events: Sequence[Event]) -> bool:
    found = {str(event.fields.get("kind")) for event in events if event.kind == "recovered"}
    return not drill.kinds or bool(found & set(drill.kinds))


def _when(event: Event) -> float:
    return event.time
