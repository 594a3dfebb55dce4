"""The result of a pair check, which is also the output of ``resilio check-nodes --json``."""

from __future__ import annotations

from typing import Literal

import msgspec

from resilio_hpc.diagnose.observations import Fault

CheckOutcome = Literal["fine", "found", "cannot_tell"]
State = Literal["healthy", "bad", "slow", "unsure"]


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Times are seconds per operation (a matrix product, an all-reduce), of the fastest block of the first round, with
    their ratios to the median of all nodes; None where it was not measured.

    ``unsure``: something was wrong, and nothing shows whose fault it was; or it could not be tested with a partner.
    ``what`` of a slow node: "compute" or "collective". ``waited``: the share of its time for which the node could not
    compute since others used its CPUs; that is not counted as slowness.
    """

    node: str
    state: State
    fault: Fault | None = None
    what: str = ""
    evidence: str = ""
    device: str = ""
    compute_s: float | None = None
    compute_ratio: float | None = None
    collective_s: float | None = None
    collective_ratio: float | None = None
    waited: float = 0.0
    partners: tuple[str, ...] = ()


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole check.

    ``outcome``: ``fine``, no node is named; ``found``, some are; ``cannot_tell``, and ``why`` says what stood in the
    way. Nodes are in the order in which they were given.
    """

    outcome: CheckOutcome
    why: str
    nodes: tuple[NodeResult, ...]
    rounds: int
    seconds: float
    version: int = 1

    def named(self, *states: State) -> tuple[str, ...]:
        """Return the nodes in these states."""
        return tuple(one.node for one in self.nodes if one.state in states)

    @property
    def bad(self) -> tuple[str, ...]:
        """Return the nodes that failed."""
        return self.named("bad")

    @property
    def slow(self) -> tuple[str, ...]:
        """Return nodes that did everything, but far slower than the others."""
        return self.named("slow")

    @property
    def good(self) -> tuple[str, ...]:
        """Return nodes without any finding."""
        return self.named("healthy")
