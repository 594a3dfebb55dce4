"""When agents are started, and started again when they end: how fast, how often, and until when. Pure.

An srun ends for two kinds of reason. Either its agent ran and ended: that must not go on for ever, so the ends within a
minute are counted. Or Slurm never started the agent (slurmctld is down, a node of the step died, a slurmd is being
restarted): that says nothing about the agent, so it is tried again, patiently, for as long as nodes may join.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from resilio_hpc.launch.config.agent_settings import AGENT_FAILED, AGENT_LIVES

RESTART_WINDOW_S = 60.0
MAX_RESTARTS_IN_WINDOW = 6
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 5.0  # while Slurm cannot launch; srun itself needs 4 to 6 s to notice that
QUIET_RETRY_S = 15.0  # after an end that is no crash: in order, or since another agent runs on the node
QUIET_STEPS = 4  # each pause is longer than the one before, since each try prints a line for the user
VERDICT_WAIT_S = 90.0  # time to wait for the verdict when all have ended in order: NFS may show it 60 s late
LIVED_S = 30.0  # an agent that ran for so long had started, whatever its exit code
HOPELESS_LAUNCHES = 6  # per placement, before it is reported that no agent can be started
COMING_UP_S = 10.0  # an srun that lasts for so long has not failed to launch

STARTS_PER_S = 20.0
STARTS_AT_ONCE = 16
STARTS_PER_S_UNANSWERED = 1.0


def agent_ran(exit_code: int, lived_s: float) -> bool:
    """Return whether an srun's end tells about its agent, and not about a launch that failed.

    Seen of srun 22.05 to 26.05: 0 when a node of the step is lost or the agent ended well, 128 + signal when the task
    was killed, the task's own exit code otherwise; 1 when slurmctld does not answer, 233 when the launch fails on a
    node, 2 when the program is not there. A negative code: srun itself was killed.
    """
    return exit_code <= 0 or exit_code in (AGENT_FAILED, AGENT_LIVES) or 128 < exit_code <= 192 or lived_s >= LIVED_S


class Attempts(Struct):
    """The starts of one placement. Times are monotonic seconds. ``patience_s``: for launches that fail."""

    patience_s: float
    next_start: float = 0.0
    given_up: bool = False
    starts: int = 0
    began: float = 0.0  # the last start
    ended_at: float = 0.0
    in_order: bool = False  # it ended with 0: a verdict is to be expected (or its srun's node is lost)
    failed_launches: int = 0  # in a row
    _quiet_ends: int = 0  # in a row
    _ran: list[float] = field(default_factory=list)  # starts within the window whose agents ran
    _failing_since: float | None = None

    def started(self, now: float) -> None:
        """Count a start."""
        self.starts += 1
        self.began = now
        self.in_order = False

    def ended(self, now: float, exit_code: int, launched_by_srun: bool) -> bool:
        """Handle an end that came too early: plan the next start, or give up. Return whether the agent had run."""
        ran = not launched_by_srun or agent_ran(exit_code, now - self.began)
        self.ended_at = now
        self.in_order = exit_code == 0
        if ran:
            self.failed_launches = 0
            self._failing_since = None
        if exit_code in (0, AGENT_LIVES):
            self._quiet_ends += 1
            self.next_start = now + QUIET_RETRY_S * min(self._quiet_ends, QUIET_STEPS)
        elif ran:
            self._quiet_ends = 0
            self._ran = [start for start in (*self._ran, self.began) if now - start < RESTART_WINDOW_S]
            self.given_up = len(self._ran) >= MAX_RESTARTS_IN_WINDOW
            self.next_start = now + FIRST_DELAY_S * 2 ** max(0, len(self._ran) - 1)
        else:
            self.failed_launches += 1
            self._failing_since = self.began if self._failing_since is None else self._failing_since
            self.given_up = now - self._failing_since >= self.patience_s
            delay = FIRST_DELAY_S * 2 ** min(10, self.failed_launches - 1)
            self.next_start = now + min(delay, LONGEST_DELAY_S)
        return ran


class Launches(Struct):
    """Counts whether starts of agents work at all: a broken installation must not be tried on all nodes for ever."""

    placements: int
    failed: int = 0
    ever_ran: bool = False

    def count(self, ran: bool) -> None:
        """Count the outcome of a start."""
        self.failed += not ran
        self.ever_ran = self.ever_ran or ran

    def hopeless(self, running_s: Iterable[float]) -> bool:
        """Return whether no agent ever ran, after many tries. ``running_s``: how long the running ones have run."""
        often = self.failed >= HOPELESS_LAUNCHES * self.placements
        return often and not self.ever_ran and max(running_s, default=0.0) < COMING_UP_S


class Pace:
    """Limits the rate of sruns: so many at once, and so many per second after them.

    Hundreds would overload slurmctld.
    """

    def __init__(self, per_s: float = STARTS_PER_S, at_once: int = STARTS_AT_ONCE) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._tokens = float(at_once)
        self._at: float | None = None

    def take(self, now: float, answering: bool = True) -> bool:
        """Return whether one more may be started now. While slurmctld does not answer, one per second may."""
        rate = self._per_s if answering else min(self._per_s, STARTS_PER_S_UNANSWERED)
        gained = 0.0 if self._at is None else (now - self._at) * rate
        self._at = now
        self._tokens = min(float(self._at_once if answering else 1), self._tokens + gained)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
