"""What an agent knows of one of its ranks in the present round."""

from __future__ import annotations

from msgspec import Struct, field

from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m


class LocalRank(Struct):
    """One rank of this node."""

    rank: int
    local_rank: int
    pid: int = -1
    attached: bool = False
    step: int = -1
    step_at: float = 0.0
    step_time: float = 0.0
    first_step_at: float | None = None
    restored: tuple[int, Tier | None, float] = (-1, None, 0.0)  # step, source, seconds
    may_exit: bool = False  # it sent Finished or Stopped
    finished_at: float | None = None  # when it sent that, or its program was over
    collected_s: float = 0.0  # by its garbage collector, so far
    section: str = ""  # what it does beside its steps
    was_paused: bool = False  # since its last step, whose time therefore tells nothing
    is_told: bool = False  # it was reported that it has not ended since
    stopped: bool = False
    done: bool = False
    failed_at: float | None = None  # Unix seconds
    restarts: int = 0  # alone, in this round
    again_since: float = 0.0  # when the process before failed, Unix seconds
    restarted_s: float | None = None  # from there to this process
    ended_well_at: float | None = None  # Unix seconds
    bad_copy: tuple[m.RestorePoint, str] | None = None  # the copy that could not be restored, and why
    snapshots: dict[int, tuple[int, float]] = field(default_factory=dict)
    holds_steps: rank_link.HoldsSteps | None = None  # it can still save the last finished step
    saves_last: bool = False  # it does so
    last_saved: rank_link.LastStepSaved | None = None
    is_kept: bool = False  # its process lives on from the round before
    can_reenter: bool = False  # it can leave this round and enter the next one
    has_raised: bool = False  # its function ended with an error, and its process waits
    is_leaving: bool = False  # it has heard that the round is over
    has_left: bool = False  # the round, and waits for the next one
