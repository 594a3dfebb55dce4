"""From a verdict to drains: which are asked for, and what becomes of the verdict where they are not carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.check import Verdict

Outcome = Literal["drained", "already", "withheld", "warned"]
"""It is drained now; it was, by us or by another, whose reason stays; it is not to be, such as in a storm; it is not to
be for this check, which fails on too many nodes at once."""


class Answer(NamedTuple):
    """What became of a drain, and why."""

    outcome: Outcome
    why: str = ""


class Drainer(Protocol):
    """Who may drain nodes. It compares before it writes, keeps others' reasons, and stops in a storm.

    All raise SlurmError where Slurm does not answer or will not.
    """

    def drain(self, node: str, check_id: str, evidence: str) -> Answer:
        """Drain ``node`` under a reason of ours."""

    def room(self, node: str) -> str:
        """ "" where the storm breaker would let ``node`` be drained now; else why not."""

    def held(self, node: str) -> frozenset[str]:
        """The checks for which we hold ``node`` drained."""

    def drained(self) -> bool:
        """Whether the node is drained, by us or another, as ``held`` last saw it."""

    def adopt(self, node: str, check_id: str, evidence: str, failed_unix_s: float) -> str:
        """Make a drain ours that Slurm made since our own prolog had failed at that time; what was done, or "" where
        there is no such drain."""

    def offer(self, node: str, passes: int) -> str:
        """What a person may do about a drain that Slurm made itself and that may have passed, as ``held`` last saw it;
        "" where there is none, or it was offered before. ``passes``: of the check for stuck processes, in a row."""

    def undrain(self, node: str, check_id: str, passes: int) -> str:
        """End our drain for a check that has passed so often in a row, if that is enough; what was done, or ""."""


@dataclass(frozen=True)
class Order:
    """A node is to be drained, for what one check found."""

    node: str
    check: str
    evidence: str


def orders(verdict: Verdict) -> list[Order]:
    """What a verdict asks for, one order a check. Pure."""
    if verdict.withheld:
        return []
    found = {one.check: one for one in reversed(verdict.findings) if one.action == "drain"}
    return [Order(verdict.node, check, found[check].evidence) for check in sorted(found)]


@dataclass(frozen=True)
class Carried:
    """What became of an order: an outcome, or ``failed``, with why."""

    order: Order
    outcome: Outcome | Literal["failed"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.order.check}: {self.why or self.order.evidence}"


def carry_out(wanted: Sequence[Order], drainer: Drainer) -> list[Carried]:
    """Ask for the drains. A Slurm that does not answer is not asked for the rest: the next verdict asks again."""
    done: list[Carried] = []
    for order in wanted:
        try:
            answer = drainer.drain(order.node, order.check, order.evidence)
            said = answer.why if answer.outcome in ("withheld", "warned") else ""
            done.append(Carried(order, answer.outcome, said))
        except SlurmError as error:
            done.append(Carried(order, "failed", str(error)))
            break
    return done
