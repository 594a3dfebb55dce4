"""What suspect results mean, from the same work done again on the same device and on another one. Pure.

A micro-batch is computed at its own rank (home), and by the next rank of its replicas (away). Where a device is faulty,
two micro-batches differ: its own, and the one that it computed for its neighbour. Where the data or the program is the
cause, home and away are the same.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from resilio_hpc.core.judgement import StepVerdict

FAR = 10.0  # a gradient's norm so many times the median of all replicas' is wrong, as no replica's samples explain it


@dataclass(frozen=True)
class StepOutcome:
    """The result of one computation of a rank: loss, norm of the gradients, digest of the gradients.

    ``why``: what is wrong with it; "" where nothing is.
    """

    loss: float
    norm: float
    digest: int
    why: str = ""

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class StepFinding:
    """``rank``: position among the replicas, -1 where not known: of the device, or of the samples."""

    verdict: StepVerdict
    rank: int = -1


def difference(one: StepOutcome, other: StepOutcome) -> float:
    """Return how far two results are apart, relative; 0.0 where they are the same bit for bit.

    1.0 where one of them is not finite and the other is, or where both are finite alike and their bits differ.
    """
    if same_bits(one, other):
        return 0.0
    if not (one.is_finite and other.is_finite):
        return 0.0 if one.is_finite == other.is_finite else 1.0
    apart = max(_apart(one.loss, other.loss), _apart(one.norm, other.norm))
    return max(apart, 2.0**-53)  # the gradients differ in bits that their norm does not show


def same_bits(one: StepOutcome, other: StepOutcome) -> bool:
    """Return whether loss and gradients are the same bit for bit."""
    return struct.pack("<d", one.loss) == struct.pack("<d", other.loss) and one.digest == other.digest


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0


def after_rerun(first: Sequence[StepOutcome], again: Sequence[StepOutcome], noise: float) -> StepFinding | None:
    """Judge the same work done again in place, of all ranks; None: the suspect result has come again.

    ``noise``: the relative difference that is usual between two computations of the same.
    """
    if any(outcome.why for outcome in again):
        return None
    changed = [at for at, pair in enumerate(zip(first, again, strict=True)) if difference(*pair) > noise]
    suspect = [at for at in changed if first[at].why and not _shared(first, at)] or changed
    if len(suspect) != 1:  # what was summed over the ranks differs everywhere: the loss is each rank's own
        suspect = [at for at, pair in enumerate(zip(first, again, strict=True)) if _loss_differs(*pair, noise)]
    return StepFinding("transient", suspect[0] if len(suspect) == 1 else -1)


def _shared(outcomes: Sequence[StepOutcome], at: int) -> bool:
    """Return whether all ranks have the same suspect gradients: they were summed before."""
    return len(outcomes) > 1 and all(other.digest == outcomes[at].digest for other in outcomes)


def _loss_differs(one: StepOutcome, other: StepOutcome, noise: float) -> bool:
    if math.isfinite(one.loss) != math.isfinite(other.loss):
        return True
    return math.isfinite(one.loss) and _apart(one.loss, other.loss) > noise


def after_exchange(home: Sequence[StepOutcome], away: Sequence[StepOutcome], noise: float) -> StepFinding:
    """Judge micro-batches that were computed at home and by the next rank: ``away[at]`` by rank ``at + 1``."""
    count = len(home)
    if count > 1 and _summed(home):  # nothing but the loss is each rank's own
        home = [StepOutcome(one.loss, one.loss, 0, one.why) for one in home]
        away = [StepOutcome(one.loss, one.loss, 0, one.why) for one in away]
    differ = [at for at in range(count) if difference(home[at], away[at]) > noise]
    if not differ:
        wrong = [at for at, outcome in enumerate(home) if outcome.why or _is_far(outcome, home)]
        return StepFinding("deterministic", wrong[0] if len(wrong) == 1 else -1)
    votes = Counter(rank for at in differ for rank in (at, (at + 1) % count))
    most = max(votes.values())
    blamed = [rank for rank, number in votes.items() if number == most]
    if count > 2 and len(blamed) == 1 and most > 1:
        return StepFinding("persistent", blamed[0])
    # the rank whose results are wrong where the other's, of the same work, are right
    wrong_ranks = {at for at in differ if _is_wrong(home[at], away[at], home)}
    wrong_ranks |= {(at + 1) % count for at in differ if _is_wrong(away[at], home[at], home)}
    return StepFinding("persistent", wrong_ranks.pop()) if len(wrong_ranks) == 1 else StepFinding("unresolved")


def _summed(outcomes: Sequence[StepOutcome]) -> bool:
    """Return whether the gradients were summed over the ranks already: they are the same, and the losses are not."""
    return len({one.digest for one in outcomes}) == 1 and len({struct.pack("<d", one.loss) for one in outcomes}) > 1


def _is_wrong(one: StepOutcome, other: StepOutcome, all_of: Sequence[StepOutcome]) -> bool:
    mine, its = bool(one.why) or _is_far(one, all_of), bool(other.why) or _is_far(other, all_of)
    return mine and not its


def _is_far(outcome: StepOutcome, all_of: Sequence[StepOutcome]) -> bool:
    finite = [one.norm for one in all_of if math.isfinite(one.norm)]
    return not outcome.is_finite or (len(finite) > 2 and outcome.norm > FAR * median(finite) > 0.0)
