"""What one agent knows of its own ranks in the present round. Pure.

It takes ranks' messages and their ends, and returns messages to the controller.
"""

from __future__ import annotations

from collections import Counter

from resilio_hpc.core import rank_link
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.root_cause import EARLY, LEFT_OUT
from resilio_hpc.launch.workers.local_digests import LocalDigests
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE, RankEvidence

LINGERS_S = 120.0  # a script may have work to do after training, or its libraries hang on the way out


class LocalRound:
    """Local ranks of round ``number`` on ``node``."""

    def __init__(self, node: str, state: m.RoundState, member: m.Member, restore: m.RestorePoint | None) -> None:
        self.node = node
        self.epoch = state.epoch
        self.number = state.round
        self.member = member
        self._state = state
        self.restore = restore
        self.failed = False
        self._tells_of_steps = state.steps_reported
        self.terminating = False
        self.target = -1  # the target of the last proposed stop
        self.stop_confirmed = False
        self.ranks = {
            local: LocalRank(member.first_rank + local, local) for local in range(member.local_world_size)
        }  # fmt: skip
        self.snapshot_whole = -1  # the newest step that all ranks here hold
        self._first_step_said = False
        self._answers: dict[int, rank_link.StopAck] = {}
        self._digests = LocalDigests((node, self.epoch, self.number))

    @property
    def kept(self) -> int:
        """Return how many ranks enter this round in the processes of the one before."""
        return sum(rank.is_kept for rank in self.ranks.values())

    @property
    def nodes(self) -> int:
        """Return how many nodes take part in the round."""
        return len(self._state.members)

    @property
    def life(self) -> m.Life:
        """Return the life of the ranks that this is."""
        return (self.epoch, self.number)

    @property
    def step(self) -> int:
        """Return the fewest steps completed by an attached rank, -1 when unknown."""
        return min((rank.step for rank in self.ranks.values() if rank.attached), default=-1)

    @property
    def furthest(self) -> int:
        """Return the most steps completed by a rank, -1 when unknown."""
        return max((rank.step for rank in self.ranks.values()), default=-1)

    @property
    def step_time(self) -> float:
        """Return the seconds of the slowest rank's last step."""
        return max((rank.step_time for rank in self.ranks.values()), default=0.0)

    @property
    def attached(self) -> list[int]:
        """Return the local ranks that use resilio_hpc.train and still run."""
        return [local for local, rank in self.ranks.items() if rank.attached and not rank.done]

    @property
    def has_attached(self) -> bool:
        """Return whether any rank uses resilio_hpc.train, those that have ended included."""
        return any(rank.attached for rank in self.ranks.values())

    @property
    def section(self) -> str:
        """Return what a rank here does beside its steps, "" where all do steps; "paused" where all of them pause."""
        found = [rank.section for rank in self.ranks.values() if not rank.done]
        if found and all(name == rank_link.PAUSED for name in found):
            return rank_link.PAUSED
        return next((name for name in found if name and name != rank_link.PAUSED), "")

    @property
    def finishing(self) -> bool:
        """Return whether a rank has finished training, was stopped or has ended: it does no more steps."""
        return any(rank.may_exit or rank.done for rank in self.ranks.values())

    def said(self, local: int, message: rank_link.RankMessage, now: float) -> list[m.ToController]:
        """Take a rank's message. Return messages to the controller."""
        rank = self.ranks[local]
        if isinstance(message, rank_link.Attach):
            rank.attached = True
            return self._left_out()
        elif isinstance(message, rank_link.StepDone):
            return self._step_done(rank, message)
        elif isinstance(message, rank_link.SnapshotTaken):
            return self._snapshot(rank, message)
        elif isinstance(message, rank_link.Restored):
            rank.restored = (message.step, message.source, message.seconds)
        elif isinstance(message, rank_link.RestoreFailed):
            rank.bad_copy = (m.RestorePoint(message.source, message.step), message.error)
        elif isinstance(message, rank_link.Section):
            rank.was_paused = rank.was_paused or rank.section == rank_link.PAUSED
            rank.section = printable(message.name, 64).encode("ascii", "replace").decode()
        elif isinstance(message, rank_link.StopAck):
            return self._stop_answer(local, message)
        elif isinstance(message, rank_link.HoldsSteps):
            rank.holds_steps = message
        elif isinstance(message, rank_link.SavingLastStep):
            rank.saves_last = True
        elif isinstance(message, rank_link.LastStepSaved):
            rank.last_saved = message
        elif isinstance(message, rank_link.ReplicaDigest):
            awaited = {one.rank for one in self.ranks.values() if one.attached and not (one.may_exit or one.done)}
            return [*self._digests.take(rank.rank, message, awaited)]
        elif isinstance(message, rank_link.StepJudged):
            return [m.ResultJudged(self.node, self.epoch, self.number, rank.rank, message.judgement)]
        elif isinstance(message, rank_link.CanReenter):
            rank.can_reenter = True
        elif isinstance(message, rank_link.LeavingRound):
            rank.is_leaving = True
        elif isinstance(message, rank_link.LeftRound):
            rank.has_left = True
        elif isinstance(message, rank_link.Stopped | rank_link.Finished):
            rank.may_exit, rank.finished_at = True, now
            rank.stopped = isinstance(message, rank_link.Stopped)
            rank.step = max(rank.step, message.step)
        return []

    def exited(
        self, local: int, exit_code: int | None, signal: int | None, at: float, error: tuple[str, str],
        evidence: RankEvidence = NO_EVIDENCE,
    ) -> list[m.ToController]:  # fmt: skip
        """Take a rank's end. ``error``: message and traceback from its error file, or empty.

        Return messages to the controller.
        """
        rank = self.ranks[local]
        rank.done = True
        if rank.has_raised:
            return []  # that was its failure
        if exit_code == 0 and not (rank.attached and not rank.may_exit):
            rank.ended_well_at = at
            return self._left_out() or self._maybe_done()
        if self.terminating and not rank.attached:
            return self._maybe_done()  # it was told to end, so its exit code does not matter
        kind = "signal" if signal is not None else "exit"
        if exit_code == 0 and rank.bad_copy is None:
            kind, error = "early_exit", (EARLY.format(max(rank.step, 0)), error[1])
        return self._failed(rank, (kind, exit_code, signal), at, error, evidence)

    def raised(self, local: int, at: float, error: tuple[str, str], evidence: RankEvidence) -> list[m.ToController]:
        """Take the error that ended a rank's function, whose process waits for the next round."""
        rank = self.ranks[local]
        if rank.has_raised or rank.done:
            return []
        rank.has_raised = True
        return self._failed(rank, ("exit", 1, None), at, error, evidence)

    def _failed(
        self, rank: LocalRank, end: tuple[str, int | None, int | None], at: float, error: tuple[str, str],
        evidence: RankEvidence,
    ) -> list[m.ToController]:  # fmt: skip
        kind, exit_code, signal = end
        message, traceback = error
        bad_copy = None
        if rank.bad_copy is not None:
            bad_copy, why = rank.bad_copy
            kind, message = "restore_failed", f"{bad_copy.source} {bad_copy.step}: {why}"
        self.failed, rank.failed_at = True, at
        failure = m.RankFailure(
            self.node, rank.rank, rank.local_rank, kind, at, exit_code, signal, message[:4000], traceback[-16000:],
            bad_copy, -1.0, evidence.log, evidence.groups,
        )  # fmt: skip
        return [m.RankFailed(self.node, self.epoch, self.number, failure, self.has_attached)]

    def begin_again(self, local: int, restart: int) -> list[m.ToController]:
        """Take note that a rank that failed starts again alone. What its last process said counts no more.

        Where the ranks are being stopped it stays ended. Return what the controller hears of that.
        """
        before = self.ranks[local]
        failed_at, before.failed_at = before.failed_at or 0.0, None
        self.failed = any(rank.failed_at is not None for rank in self.ranks.values())
        if self.terminating:
            return self._maybe_done()
        self.ranks[local] = LocalRank(before.rank, local, restarts=restart, again_since=failed_at)
        return []

    def _left_out(self) -> list[m.ToController]:
        """Report a rank that ended with 0 and never attached, while others train: no step would be whole again."""
        trains = any(rank.attached and not rank.may_exit for rank in self.ranks.values())
        others = self._tells_of_steps and not self.has_attached and not all(rank.done for rank in self.ranks.values())
        if self.failed or self.terminating or not (trains or others):
            return []  # where all have ended, the controller knows whether others train
        for rank in self.ranks.values():
            if rank.ended_well_at is not None and not rank.attached:
                self.failed = True
                failure = m.RankFailure(
                    self.node, rank.rank, rank.local_rank, "early_exit", rank.ended_well_at, 0, None, LEFT_OUT
                )
                return [m.RankFailed(self.node, self.epoch, self.number, failure)]
        return []

    def lingering(self, now: float) -> list[LocalRank]:
        """Return ranks that finished LINGERS_S ago and have not ended, each of them once."""
        found = [
            rank for rank in self.ranks.values()
            if rank.finished_at is not None and now - rank.finished_at > LINGERS_S and not (rank.done or rank.is_told)
        ]  # fmt: skip
        for rank in found:
            rank.is_told = True
        return found

    def propose_stop(self, target: int) -> list[m.ToController]:
        """Take a proposal of a stop or a pause, which each rank answers, also when it is repeated.

        The answer comes at once if no rank is attached, else when all attached ranks have answered.
        """
        self.target, self._answers = target, {}
        return self._maybe_answer()

    def resume(self) -> None:
        """Take note that the pause is over."""
        self.target, self._answers = -1, {}

    def pending_stop(self) -> list[rank_link.AgentMessage]:
        """Return the messages about a stop that a newly attached rank must get."""
        proposal: list[rank_link.AgentMessage] = [rank_link.StopAt(self.target)] if self.target >= 0 else []
        return [*proposal, rank_link.StopConfirmed(self.target)] if self.stop_confirmed else proposal

    def _step_done(self, rank: LocalRank, message: rank_link.StepDone) -> list[m.ToController]:
        if rank.first_step_at is not None and message.step > rank.step and not rank.was_paused:
            rank.step_time = max(0.0, message.time - rank.step_at) / (message.step - rank.step)
        rank.was_paused = False
        rank.step, rank.step_at = message.step, message.time
        rank.collected_s = message.collected_s
        if rank.first_step_at is None:
            rank.first_step_at = message.time
            return self._maybe_first_step()
        return []

    def _maybe_first_step(self) -> list[m.ToController]:
        times = [rank.first_step_at for rank in self.ranks.values()]
        if self._first_step_said or None in times:
            return []
        self._first_step_said = True
        step = next(iter(self.ranks.values())).restored[0]
        found = Counter(rank.restored[1] for rank in self.ranks.values())
        sources = tuple((tier, found[tier]) for tier in Tier if found[tier])
        last = max(time for time in times if time is not None)
        longest = max(rank.restored[2] for rank in self.ranks.values())
        return [m.FirstStep(self.node, self.epoch, self.number, self.step, last, step, sources, longest)]

    def _snapshot(self, rank: LocalRank, message: rank_link.SnapshotTaken) -> list[m.ToController]:
        rank.snapshots[message.step] = (message.size_bytes, message.blocked_s)
        if not all(message.step in other.snapshots for other in self.ranks.values()):
            return []
        taken = [other.snapshots[message.step] for other in self.ranks.values()]
        for other in self.ranks.values():
            other.snapshots = {step: value for step, value in other.snapshots.items() if step > message.step}
        self.snapshot_whole = max(self.snapshot_whole, message.step)
        size = sum(size for size, _ in taken)
        return [m.SnapshotWhole(self.node, self.epoch, self.number, message.step, size, max(b for _, b in taken))]

    def _stop_answer(self, local: int, message: rank_link.StopAck) -> list[m.ToController]:
        if message.target != self.target:
            return []
        self._answers[local] = message
        return self._maybe_answer()

    def _maybe_answer(self) -> list[m.ToController]:
        waiting = [local for local in self.attached if local not in self._answers and not self.ranks[local].may_exit]
        if waiting or self.target < 0:
            return []
        answers = list(self._answers.values())
        accepted = all(answer.accepted for answer in answers)
        step = max((answer.step for answer in answers), default=-1)
        return [
            m.StopAnswer(self.node, self.epoch, self.number, self.target, accepted, step, len(self.attached)),
        ]

    def _maybe_done(self) -> list[m.ToController]:
        if self.failed or not all(rank.done for rank in self.ranks.values()):
            return self._maybe_answer()
        stopped = any(rank.stopped for rank in self.ranks.values()) or self.terminating
        done = m.RanksDone(
            self.node, self.epoch, self.number, stopped, self.furthest, self.snapshot_whole, self.has_attached
        )
        return [done]
