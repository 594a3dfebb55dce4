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
    certain: bool = True


@dataclass(frozen=True)
class Recovered:
    """All ranks train again (or have ended), from step ``restored``, -1 for a fresh start."""

    at: float  # Unix seconds
    restored: int


# -- tests of nodes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PauseAndTest:
    """Let all ranks pause at a step boundary, test the nodes, and let the ranks go on.

    ``replace``: nodes that are found bad or slow get no ranks after the next commit. ``asked``: the mark of an order
    that was given by hand, "" for one of the controller's own, which come seldom.
    """

    reason: str
    replace: bool = False
    asked: str = ""


@dataclass(frozen=True)
class TestSuspects:
    """Test the nodes before the ranks of the next round start, since ``RunState.in_doubt`` are in doubt."""

    __test__ = False  # pytest: no class of tests


@dataclass(frozen=True)
class PartWithUnfit:
    """Go on without members that a test found unfit: at once, or right after the next commit."""

    at_once: bool


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
class NodeUnfit:
    """No ranks can run on a node, and none have run there: plan the round without it."""

    node: str


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
    TryRound | PrepareRound | StepCommitted | StepAbandoned | StartingRanks | SlowStart | HangFound | Recovered
    | VotersSettled | HoldWitness | MayCommit | RepeatStop | LetLeaversGo | NodeUnfit | EndStopped | EndRun | EndAlone
    | PauseAndTest | PartWithUnfit | TestSuspects
)  # fmt: skip
Intend = Callable[[Intent], None]
