"""From scores to Slurm: weights of nodes, and drains at the threshold; back again as scores fall.

Drains go through DrainWriter, with its rules and its storm breaker. A weight is read right before it is written, and
again after it; where another order came at the same moment, it is no longer this package's (see ``node_weights``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.update_count import came_alone, count_with_ours
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from resilio_hpc.slurm.drain.reason import Finding, read_reason
from resilio_hpc.slurm.drain.writer import ACT, DrainWriter
from resilio_hpc.slurm.node_faults.from_slurm import DRAINED_FOR_FAULTS
from resilio_hpc.slurm.node_faults.node_weights import KnownWeight, Step, WeightDecision, decide_weight
from resilio_hpc.slurm.node_faults.policy import FaultPolicy
from resilio_hpc.slurm.node_faults.score import NodeScore
from resilio_hpc.slurm.node_faults.weight_file import WeightFile
from resilio_hpc.slurm.orders.audit import AuditEntry, AuditLog

WeightResult = Literal["set", "restored"]


@dataclass(frozen=True)
class Steered:
    """The outcome for one node.

    ``act``: weight or drain; ``result``: for a weight "set" and "restored", or as for a drain.
    """

    node: str
    act: str
    result: DrainResult | WeightResult
    why: str
    unanswered: bool = False


class Steering:
    """Applies scores to Slurm. ``mode``: like that of DrainWriter, which must have the same."""

    def __init__(
        self,
        client: SlurmClient,
        drains: DrainWriter,
        weights: WeightFile,
        audit: AuditLog,
        policy: FaultPolicy,
        mode: str = ACT,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._drains = drains
        self._weights = weights
        self._audit = audit
        self._policy = policy
        self._mode = mode
        self._clock = clock
        self._sleep = sleep

    def apply(
        self,
        nodes: Sequence[Node],
        scored: Mapping[str, NodeScore],
        told: Callable[[Steered], None],
        adopt: bool = False,
    ) -> None:
        """Apply to all ``nodes``, as in Slurm's last answer. ``told`` is called with each change, done or planned.

        Raises HealthError where the owners of weights cannot be stored: then no weight is written.
        """
        known = self._weights.read()
        if adopt:
            known |= adopted(nodes, known)
        for node in nodes:
            one = scored.get(node.name)
            for steered in (self._weight(node, one, known), self._drain(node, one)):
                if steered is not None:
                    told(steered)
                    if steered.unanswered:
                        return
        if self._mode == ACT and known != self._weights.read():
            self._weights.write(known)

    # -- drains ------------------------------------------------------------------------------------------------

    def _drain(self, node: Node, one: NodeScore | None) -> Steered | None:
        """Drain or undrain a node; Slurm is asked again only for nodes that need a change."""
        score = one.score if one else 0.0
        ours = read_reason(node.reason) if node.state.drain else None
        held = any(finding.check == DRAINED_FOR_FAULTS for finding in ours or ())
        if one is not None and score >= self._policy.drain_at and not held:
            return _steered(self._drains.drain(node.name, Finding(DRAINED_FOR_FAULTS, one.summary)))
        if held and score < self._policy.undrain_below:
            return _steered(self._drains.undrain(node.name, DRAINED_FOR_FAULTS))
        return None

    # -- weights -----------------------------------------------------------------------------------------------

    def _weight(self, node: Node, one: NodeScore | None, known: dict[str, KnownWeight]) -> Steered | None:
        add = self._policy.added_weight(one.score) if one else 0
        decision = decide_weight(node.weight, known.get(node.name), add)
        if not decision.writes:
            _remember(known, node.name, decision)
            return _left(node.name, decision) if add else None
        why = f"{decision.why} ({one.summary})" if one else decision.why
        if self._mode != ACT:
            return self._said(node, decision, DrainResult.WOULD_ACT, why)
        try:
            return self._write_weight(node, decision, known, add, why)
        except SlurmError as error:
            lost = isinstance(error, Unanswered)
            result = DrainResult.UNKNOWN if lost else DrainResult.REFUSED
            return self._said(node, decision, result, str(error), lost)

    def _write_weight(
        self, node: Node, first: WeightDecision, known: dict[str, KnownWeight], add: int, why: str
    ) -> Steered:
        """Store the new owner of the weight, compare, write, look."""
        _remember(known, node.name, first)
        self._weights.write(known)  # first, so that a command that dies after the order knows it again
        count = self._client.node_updates()
        now = self._look(node.name)
        decision = decide_weight(now, known.get(node.name), add)
        if not decision.writes:
            _remember(known, node.name, decision)
            return self._said(node, decision, DrainResult.OVERTAKEN, decision.why)
        self._client.orders.set_weight([node.name], decision.weight)
        alone = came_alone(count, count_with_ours(self._client.node_updates, count, self._sleep))
        after = self._look(node.name)
        if after != decision.weight:
            return self._said(node, decision, DrainResult.OVERTAKEN, f"now weight {after}")
        if not alone and decision.known is not None:
            known[node.name] = KnownWeight(site=decision.known.site, ours=decision.known.ours, contested=True)
            said = "another order came at the same moment: look, then --adopt"
            return self._said(node, decision, DrainResult.CONTESTED, said)
        _remember(known, node.name, decide_weight(after, decision.known, add))
        return self._said(node, decision, "set" if add else "restored", why)

    def _look(self, name: str) -> int | None:
        return next((node.weight for node in self._client.nodes([name])), None)

    def _said(
        self, node: Node, decision: WeightDecision, result: DrainResult | WeightResult, why: str, lost: bool = False
    ) -> Steered:
        entry = AuditEntry(
            time=self._clock(), step="outcome", act="weight", node=node.name, mode=self._mode, result=result, why=why,
            check=DRAINED_FOR_FAULTS, evidence=f"weight {node.weight} to {decision.weight}",
        )  # fmt: skip
        self._audit.record(entry)
        return Steered(node.name, "weight", result, why, lost)


def adopted(nodes: Sequence[Node], known: Mapping[str, KnownWeight]) -> dict[str, KnownWeight]:
    """Return the weights that are neither the site's nor this package's; from now on they count as the site's. Pure."""
    others = [node for node in nodes if decide_weight(node.weight, known.get(node.name), 0).step is Step.LEAVE]
    return {node.name: KnownWeight(site=node.weight) for node in others if node.weight is not None}


def _remember(known: dict[str, KnownWeight], name: str, decision: WeightDecision) -> None:
    if decision.known is not None:
        known[name] = decision.known


def _left(name: str, decision: WeightDecision) -> Steered:
    results = {Step.LEAVE: DrainResult.LEFT, Step.UNKNOWN: DrainResult.UNKNOWN}
    return Steered(name, "weight", results.get(decision.step, DrainResult.NOTHING), decision.why)


def _steered(outcome: DrainOutcome) -> Steered:
    return Steered(outcome.node, "drain", outcome.result, outcome.why, outcome.unanswered)
