"""Digests of a rank's parameters and optimizer state, for the comparison with its replicas.

At each step boundary one part is digested, so that a sweep over all parts costs little in each step. All replicas
digest the same part at the same boundary. At a sweep's end the digests go to the agent, and the controller compares
them (``launch/controller/checkpoints/replica_check``). No rank waits for another one, so nothing can block.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

from resilio_hpc.core.rank_link import ReplicaDigest
from resilio_hpc.train.validation.digest_plan import DigestPlan, Values, folded, plan_of

DEFAULT_STEPS = 100
"""Steps within which a difference is found."""


class ReplicaSweep:
    """Digests of one rank.

    ``state``: returns what is digested; ``group``: the name of the replicas' group, which has ``replicas`` ranks.
    ``within``: steps within which a difference is known. A sweep takes half of that: a tensor may change right after
    its turn, and the digests of a sweep are sent at its end.
    """

    def __init__(
        self, state: Callable[[], Any], group: str, replicas: int, send: Callable[[ReplicaDigest], None],
        within: int = DEFAULT_STEPS,
    ) -> None:  # fmt: skip
        self._state = state
        self._group = group
        self._replicas = replicas
        self._send = send
        self.parts = max(1, within // 2)
        self._plan: DigestPlan | None = None
        self._found: list[Values] = []
        self._first = 0
        self._sent_mark = -1
        self._failed = False

    def at_boundary(self, completed: int) -> None:
        """Digest the part of this boundary; ``completed``: steps done, the same for all replicas.

        An error ends the comparison, and no training: it is said once.
        """
        if self._failed:
            return
        try:
            self._digest(completed)
        except Exception as error:  # noqa: BLE001 - the state's own code runs here, and torch's
            self._failed = True
            print(f"resilio: replicas are not compared: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _digest(self, completed: int) -> None:
        part = (completed - 1) % self.parts
        if self._plan is None or not self._found or part != self._first + len(self._found):
            self._plan = plan_of(self._state(), self.parts, self._plan)  # tensors may have come, or been replaced
            self._found, self._first = [], part
        self._found.append(self._plan.digest(part))
        if part == self.parts - 1:
            self._tell(self._plan, completed)

    def _tell(self, plan: DigestPlan, completed: int) -> None:
        if not plan.tensors:  # nothing was compared, so no step may be called verified
            self._found = []
            return
        numbers = folded(self._found)
        digests = struct.pack(f"<{len(numbers)}Q", *numbers)
        labels = plan.labels() if plan.mark != self._sent_mark else ()
        self._sent_mark = plan.mark
        self._send(
            ReplicaDigest(completed, self._first, self.parts, self._group, self._replicas, plan.mark, digests, labels)
        )
        self._found = []
