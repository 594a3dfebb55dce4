"""How all ranks stop at the same step (time limit, SIGTERM). Pure.

Ranks run in lockstep but hear of a stop at different moments. So a target step is proposed; a rank that has begun a
step beyond it declines; then a later target is proposed; when every member accepted, the target is confirmed. Ranks
wait at the target for the confirmation, so no rank can be more than a step beyond it.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct, field

MARGIN_STEPS = 2


class StopAgreement(Struct):
    """One negotiation. ``target``: the step proposed last; ``confirmed``: it, once every member has accepted."""

    nodes: frozenset[str] = frozenset()
    target: int = -1
    confirmed: bool = False
    _accepted: dict[str, int] = field(default_factory=dict)  # node → its ranks that report steps

    @property
    def attached(self) -> int:
        """Return how many ranks that report steps have accepted."""
        return sum(self._accepted.values())

    def propose(self, nodes: Collection[str], step: int) -> int:
        """Start negotiating with ``nodes``, the furthest of which is known to have completed ``step``."""
        self.nodes = frozenset(nodes)
        return self._set_target(step)

    def answer(self, node: str, target: int, accepted: bool, step: int, attached: int) -> str:
        """Take a node's answer; returns "" (wait), "repropose", "confirm", or "plain" (no rank uses our API)."""
        if node not in self.nodes or target != self.target or self.confirmed:
            return ""
        if not accepted:
            self._set_target(max(step, self.target))
            return "repropose"
        self._accepted[node] = max(attached, self._accepted.get(node, 0))
        if self._accepted.keys() != self.nodes:
            return ""
        self.confirmed = True
        return "confirm" if self.attached else "plain"

    def _set_target(self, step: int) -> int:
        self.target = step + MARGIN_STEPS
        self._accepted.clear()
        return self.target
