"""Intents: what one part of the controller asks of another. ``Controller`` carries them out.

Parts do not know each other. An intent is carried out at once, so messages and ledger entries keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilio_hpc.launch.protocol import messages as m

# -- rounds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TryRound:
    """Prepare the next round if the nodes that it needs are in."""


@dataclass(frozen=True)
class PrepareRound:
    """Stop the old ranks, then start those of these members."""

    members: tuple[m.Member, ...]


@dataclass(frozen=True)
class StepCommitted:
    """A step is durable. A completed run may end, and planned changes of the world cost least now."""


@dataclass(frozen=True)
class StepAbandoned:
    """A step could not be written. A completed run no longer waits for it."""


# -- failures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartingRanks:
    """The ranks of a new round are about to start."""


@dataclass(frozen=True)
class SlowStart:
    """The round did not come up in time."""


@dataclass(frozen=True)
class HangFound:
    """The ranks hang and must be restarted. ``ranks``: those to blame, if known; ``since``: Unix seconds."""

    ranks: tuple[int, ...]
    evidence: str
    since: float
    place: str  # the program's line, if known


@dataclass(frozen=True)
class SlowFound:
    """These ranks, and the nodes that they are on, slow the run down, and the cause is known."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    evidence: str


@dataclass(frozen=True)
class Recovered:
    """All ranks train again (or have ended), from step ``restored``, -1 for a fresh start."""

    at: float  # Unix seconds
    restored: int


# -- votes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VotersSettled:
    """A quorum has stored which nodes vote in this epoch."""


@dataclass(frozen=True)
class HoldWitness:
    """The nodes that are here hold the witness: half of the votes are a quorum."""


@dataclass(frozen=True)
class MayCommit:
    """No older epoch can commit any more, and its commits are known."""


# -- stops and the end -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepeatStop:
    """A member may have missed the orders to stop."""

    node: str


@dataclass(frozen=True)
class LetLeaversGo:
    """End the agents of nodes that leave and take no part any more."""


@dataclass(frozen=True)
class EndStopped:
    """All ranks have stopped as agreed, or are being killed: end this job's part of the run."""


@dataclass(frozen=True)
class EndRun:
    """End the run, or this job's part of it, as soon as a quorum stands with the controller."""

    verdict: str
    exit_code: int
    reason: str
    failure: m.RankFailure | None = None


@dataclass(frozen=True)
class EndAlone:
    """End a job in which a quorum never came together."""

    verdict: str
    exit_code: int
    reason: str


Intent = (
    TryRound | PrepareRound | StepCommitted | StepAbandoned | StartingRanks | SlowStart | HangFound | SlowFound
    | Recovered | VotersSettled | HoldWitness | MayCommit | RepeatStop | LetLeaversGo | EndStopped | EndRun | EndAlone
)  # fmt: skip
Intend = Callable[[Intent], None]
