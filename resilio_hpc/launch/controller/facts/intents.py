"""Intents: what one part of the controller asks of another. ``Controller`` carries them out.

Parts do not know each other. An intent is carried out at once, so messages and ledger entries keep their order.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from resilio_hpc.launch.protocol import messages as m

# -- rounds ----------------------------------------------------------------------------------------------------


class TryRound(Struct, frozen=True):
    """Prepare the next round if the nodes that it needs are in."""


class PrepareRound(Struct, frozen=True):
    """Stop the old ranks, then start those of these members."""

    members: tuple[m.Member, ...]


class StepCommitted(Struct, frozen=True):
    """A step is durable. A completed run may end, and planned changes of the world cost least now."""


class StepAbandoned(Struct, frozen=True):
    """A step could not be written. A completed run no longer waits for it."""


# -- failures --------------------------------------------------------------------------------------------------


class StartingRanks(Struct, frozen=True):
    """The ranks of a new round are about to start."""


class SlowStart(Struct, frozen=True):
    """The round did not come up in time."""


class HangFound(Struct, frozen=True):
    """The ranks hang and must be restarted. ``ranks``: those to blame, if known; ``since``: Unix seconds.

    ``kind``: "hang", or "early_exit" where their processes have ended with 0.
    """

    ranks: tuple[int, ...]
    evidence: str
    since: float
    place: str  # the program's line, if known
    certain: bool = True
    kind: str = "hang"


class CorruptionFound(Struct, frozen=True):
    """Replicas differ, so the ranks must go back. ``ranks``: those to blame, or all; ``since``: Unix seconds."""

    ranks: tuple[int, ...]
    evidence: str
    since: float
    certain: bool


class Recovered(Struct, frozen=True):
    """All ranks train again (or have ended), from step ``restored``, -1 for a fresh start."""

    at: float  # Unix seconds
    restored: int


# -- tests of nodes --------------------------------------------------------------------------------------------


class PauseAndTest(Struct, frozen=True):
    """Let all ranks pause at a step boundary, test the nodes, and let the ranks go on.

    ``replace``: nodes that are found bad or slow get no ranks after the next commit. ``asked``: the mark of an order
    that was given by hand, "" for one of the controller's own, which come seldom.
    """

    reason: str
    replace: bool = False
    asked: str = ""


class TestSuspects(Struct, frozen=True):
    """Test the nodes before the ranks of the next round start, since ``RunState.in_doubt`` are in doubt."""

    __test__ = False  # pytest: no class of tests


class PartWithUnfit(Struct, frozen=True):
    """Go on without members that a test found unfit: at once, or right after the next commit."""

    at_once: bool


# -- votes -----------------------------------------------------------------------------------------------------


class VotersSettled(Struct, frozen=True):
    """A quorum has stored which nodes vote in this epoch."""


class HoldWitness(Struct, frozen=True):
    """The nodes that are here hold the witness: half of the votes are a quorum."""


class MayCommit(Struct, frozen=True):
    """No older epoch can commit any more, and its commits are known."""


# -- stops and the end -----------------------------------------------------------------------------------------


class RepeatStop(Struct, frozen=True):
    """A member may have missed the orders to stop."""

    node: str


class LetLeaversGo(Struct, frozen=True):
    """End the agents of nodes that leave and take no part any more."""


class NodeUnfit(Struct, frozen=True):
    """No ranks can run on a node, and none have run there: plan the round without it."""

    node: str


class EndStopped(Struct, frozen=True):
    """All ranks have stopped as agreed, or are being killed: end this job's part of the run."""


class EndRun(Struct, frozen=True):
    """End the run, or this job's part of it, as soon as a quorum stands with the controller."""

    verdict: str
    exit_code: int
    reason: str
    failure: m.RankFailure | None = None


class EndAlone(Struct, frozen=True):
    """End a job in which a quorum never came together."""

    verdict: str
    exit_code: int
    reason: str


Intent = (
    TryRound | PrepareRound | StepCommitted | StepAbandoned | StartingRanks | SlowStart | HangFound | Recovered
    | CorruptionFound
    | VotersSettled | HoldWitness | MayCommit | RepeatStop | LetLeaversGo | NodeUnfit | EndStopped | EndRun | EndAlone
    | PauseAndTest | PartWithUnfit | TestSuspects
)  # fmt: skip
Intend = Callable[[Intent], None]
