"""One process of a virtual rank, and how it behaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilio_hpc.core import rank_link
from tests.support.virtual_cluster.ranks import Life


@dataclass(frozen=True)
class Behaviour:
    """How a rank does what it is asked: after so many seconds, or what becomes of it instead.

    ``fate``: "deaf", it does not answer; "dies" or "stops" (SIGSTOP) on the way; "hangs" on the way; "unable";
    "waits in vain": it ends while it waits for the next round.
    """

    seconds: float = 0.02
    fate: str = ""


@dataclass(eq=False)
class RankProcess:
    """One process. ``life``: the round that it takes part in; None: it has left one, and waits for another."""

    pid: int
    rank: int
    local_rank: int
    life: Life | None
    round: int  # which its connection names
    is_stopped: bool = False
    is_ordered_out: bool = False
    makes_groups: bool = True  # it has entered, and waits for its peers
    saved: bool = False
    is_unable: bool = False  # to save its last step: an optimizer's step had begun
    saves: int = 0  # of its last step: under way, or waiting for the one under way
    order: rank_link.EnterRound | None = None  # it has come, and is not followed yet
    entered: Callable[[], None] = lambda: None
