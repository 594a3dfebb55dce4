"""The chain in the launcher: judge the part before, take the turn, keep a successor queued, end the chain.

Decisions are in ``judge``; the order of turns in ``run_claim``; waiting for nodes that may still run in ``fencing``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import fencing, maintenance, orphaned_job, preemption, run_choice, run_in_use, step_tasks
from resilio_hpc.launch.chain.continuation_policy import CONTINUES, Continuation, judge
from resilio_hpc.launch.chain.predecessor import gather, newest_commit
from resilio_hpc.launch.chain.requeueing import REQUEUE_POLL_S, requeue
from resilio_hpc.launch.chain.successor import ChainSuccessor
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.rundir import chain_order, holder, run_claim, run_directory
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client import commands

USER_ENDED = ("CANCELLED",)
CLOSING_S = 60.0  # time for ``close`` to ask Slurm when the launch is over
TURN_RETRY_S = 0.2
FOLLOWER_WAIT_S = 60.0 + fencing.LIMIT_S  # time for the leading supervisor of an srun step to take the turn


class Chain:
    """One job's view of its chain. ``active``: a successor exists or will."""

    def __init__(
        self,
        options: LaunchOptions,
        site: Site,
        run_path: Path,
        ledger: Ledger,
        show_life: Callable[[int], None] = lambda _turn: None,
    ) -> None:
        """Take the launch's parts; ``show_life``: begins the pulse of a turn that was taken (``holder``)."""
        self._options = options
        self._site = site
        self._run_path = run_path
        self._ledger = ledger
        self._show_life = show_life
        # {"ready": True, "begins": EPOCH} or {"refused": WHY}
        self._ready_file = run_path / "links" / f"{site.key}.ready"
        self.number = chain.link_number(os.environ) if site.mode is not SiteMode.LOCAL else 1
        self._order = chain_order.read(run_path)
        self._chained = options.chain and site.mode is not SiteMode.LOCAL
        wanted = self._chained and self.number < self._limit
        self.active = wanted and options.mode != Mode.OBSERVE
        self._only_observed = wanted and not self.active
        self.stop_ordered = False  # by a user, while this job ran
        self.successor = ChainSuccessor(options, site, run_path, ledger, lambda: self._read_order().stopped)
        self.begins = 0  # the epoch that this job's part of the run took
        self._begun = False
        self._turn: run_claim.Turn | None = None
        self._goes_on = False  # at the end: there is work left
        self._preempted = False  # at the end: Slurm will requeue the job by itself

    # -- the beginning -----------------------------------------------------------------------------------------

    def judge_predecessor(self) -> str | None:
        """Return why this job has nothing to do; None where it has the turn, and no rank of the part before runs."""
        verdict = run_directory.read_verdict(self._run_path)
        if verdict is not None and verdict.get("verdict") == "completed":
            run_choice.note_visit(self._run_path, os.environ)
            return f"this run is already complete: nothing to do (another --run-dir starts a new run; {self._run_path})"
        if not self._site.leads:
            return self._follow_the_leader()
        while True:
            number = run_claim.next_number(self._run_path)  # before the look: a job that comes in between takes it
            last = next(iter(run_claim.newest(self._run_path)), None)
            try:
                decision = self._judge(last)
            except UsageError as error:
                self._tell_followers({"refused": str(error)})
                raise
            if not decision.goes_on:
                return self._stop(decision)
            if self._take_turn(number):
                break
            time.sleep(TURN_RETRY_S)  # an NFS client may not show the other job's turn yet
        try:
            self._lift_stop()
            self.begin()  # first, since the rest takes long: the chain goes on whatever happens to this job
            self._begin_part()
            if last and self._site.mode is not SiteMode.LOCAL and run_in_use.is_of_slurm(last):
                self._wait_for(last, decision.clean)
        except ResilioError as error:
            self._tell_followers({"refused": str(error)})
            raise
        self._tell_followers({"ready": True, "begins": self.begins})
        return None

    def _judge(self, last: run_claim.Turn | None) -> Continuation:
        """Judge the part before. Raises UsageError while another launch has the run."""
        if last is None:
            return Continuation(True, "", clean=True)
        run_in_use.refuse_if_held(self._run_path, last, self._site)
        if run_in_use.judged_by_slurm(last, self._site):
            return self._judge_job(last)
        ended = run_directory.read_verdict(self._run_path, last.part) is not None
        return Continuation(True, "started by hand", clean=ended)

    def _judge_job(self, last: run_claim.Turn) -> Continuation:
        revived = chain.REVIVED in os.environ  # by a user, who knows how the part before ended
        predecessor = "" if revived else os.environ.get("RESILIO_PREDECESSOR", "")
        evidence = gather(self._run_path, last, self._site, predecessor)
        decision = judge(evidence)
        if decision.goes_on and (evidence.chained or evidence.requeued) and self._read_order().stopped:
            decision = Continuation(False, f"{chain_stopped(self._order)}: nothing to do here", "cancelled")
        self._ledger.append(
            "predecessor", job=last.job, part=last.part, verdict=evidence.verdict or None, state=evidence.state,
            by=evidence.by, handover=evidence.handover.reason if evidence.handover else None, link=self.number,
            goes_on=decision.goes_on, reason=decision.reason, heard=fencing.last_heard(self._run_path),
        )  # fmt: skip
        return decision

    def _take_turn(self, number: int) -> bool:
        turn = run_claim.Turn(
            number, self._site.key, self._site.job, self.number, self._site.nodes, newest_commit(self._run_path),
            time.time(), holder.this_process(os.environ),
        )  # fmt: skip
        self._turn = turn if run_claim.take(self._run_path, turn) else None
        if self._turn is not None:
            self._show_life(number)
        return self._turn is not None

    def _begin_part(self) -> None:
        """Take an epoch: leaders of earlier parts step down when they see it, and agents know what is later."""
        chain_order.expect(self._run_path)
        self.begins = fencing.take_epoch(self._run_path, self._site.key)

    def _wait_for(self, last: run_claim.Turn, ended: bool) -> None:
        waited = fencing.wait_for_predecessor(
            self._run_path, last, self._options.heartbeat_timeout_s, say, ended, last.job != self._site.job
        )
        self._ledger.append("waited_for_predecessor", part=last.part, seconds=round(waited, 1))

    def _tell_followers(self, news: dict[str, Any]) -> None:
        if self._site.mode is SiteMode.STEP:
            step_tasks.tell(self._ready_file, news)

    def _follow_the_leader(self) -> str | None:
        """Wait for the decision of the first task; for every other task of an srun step."""
        run_directory.expect_verdict(self._run_path, self._site.key)
        verdict = partial(run_directory.read_verdict, self._run_path, self._site.key)
        late = {"refused": "the first task of this step did not take its turn: nothing to do here"}
        news = step_tasks.hear(self._ready_file, FOLLOWER_WAIT_S, verdict) or late
        if not news.get("ready"):
            return str(news.get("refused") or news.get("reason", "this job has nothing to do"))
        self.begins = int(news["begins"])
        return None

    def _stop(self, decision: Continuation) -> str:
        verdict = {"verdict": decision.verdict, "exit_code": 0, "reason": decision.reason}
        if decision.verdict == "superseded":  # the run's verdict is another job's
            write_atomic(self._run_path / "links" / f"{self._site.key}.json", json.dumps({"v": 1, **verdict}).encode())
        else:
            run_directory.write_verdict(self._run_path, self._site.key, verdict)
        return decision.reason

    # -- the successor -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Submit the successor at the start, so that it exists whatever happens to this job.

        A second call changes nothing.
        """
        if self._begun:
            return
        self._begun = True
        if self._only_observed and self._site.leads:
            self._ledger.append("successor", job="", link=self.number + 1, acted=False)
        if self.active and self._site.leads:
            self.successor.submit_first()
        elif self._chained and self._site.leads and not self._only_observed:
            self.successor.keep_for_later()

    # -- what its user orders meanwhile (chain_order) -----------------------------------------------------------

    @property
    def _limit(self) -> int:
        return self._order.limit_of(self._options.chain_max)

    def _read_order(self) -> ChainOrder:
        self._order = chain_order.read(self._run_path)
        return self._order

    def _lift_stop(self) -> None:
        """Lift the stop: a user who starts a job by hand after it wants the run to go on."""
        if self._read_order().stopped:
            chain_order.write(self._run_path, replace(self._order, stopped=False, time=time.time()))

    def heed(self, order: ChainOrder) -> bool:
        """Take the order that stands, as last seen in the run directory. Return whether this job must stop."""
        if not (self._chained and self._site.leads) or (order == self._order and order.stopped == self.stop_ordered):
            return self.stop_ordered
        self._order = order
        if order.stopped and not self.stop_ordered:
            self.stop_ordered, self.active = True, False
            self._ledger.append("chain_stopped", by=order.by, job=self._site.job)
            say(f"{chain_stopped(order)}: this job saves and ends")
        elif not (self.stop_ordered or self.active or self._only_observed) and self.number < self._limit:
            self.active = True
            self.successor.allow()
        return self.stop_ordered

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, verdict: dict[str, Any]) -> None:
        """Cancel the successor, unless there is work left for it."""
        if self._site.leads:
            with self.successor.busy:
                self._close(verdict)

    def _close(self, verdict: dict[str, Any]) -> None:
        name = verdict.get("verdict")
        left = (name == "terminated" or name in CONTINUES) and not self._read_order().stopped
        in_slurm = self._site.mode is not SiteMode.LOCAL
        self._goes_on = left and not (in_slurm and commands.job_state(self._site.job) in USER_ENDED)
        if self._goes_on:
            self.successor.submit_late(time.time())
            self._preempted = self._may_be_requeued and preemption.under_way(self._site.job)
        if not self._goes_on:
            self.successor.cancel(name)
        elif self.successor.job is not None:
            maintenance.fit_next_job(self._run_path, self.successor.job, self._ledger.append, time.time())

    @property
    def _requeues_itself(self) -> bool:
        turn = self._turn.number if self._turn else self._limit
        return bool(self.successor.late) and self._goes_on and self._site.leads and turn < self._limit

    @property
    def _may_be_requeued(self) -> bool:
        """Return whether no other job carries on, so that this one may be requeued."""
        alone = self.successor.job is None and not self._requeues_itself
        return self._goes_on and alone and self._site.mode is not SiteMode.LOCAL

    @property
    def next_job(self) -> str | None:
        """Return the job that carries the run on, if there is work left: a successor, or this one again."""
        return self._site.job if self._requeues_itself or self._preempted else self.successor.job

    def leave(self, poll_s: float = REQUEUE_POLL_S) -> None:
        """As the last act, make sure that this job is queued again where no other job carries on."""
        free = self.successor.busy.acquire(timeout=CLOSING_S)
        try:
            self._leave(poll_s)
        finally:
            if free:
                self.successor.busy.release()

    def _leave(self, poll_s: float) -> None:
        if self._site.mode is SiteMode.STEP and not self._site.leads:
            orphaned_job.stand_in(self._run_path, self._site.key, self._site.nodes)
        elif self._requeues_itself:
            self._requeue(poll_s)
        elif self._may_be_requeued:
            stayed_s = preemption.stay_until_ended(self._site.job)
            if self._preempted:
                self._ledger.append("stayed_for_requeue", job=self._site.job, seconds=round(stayed_s, 1))

    def _requeue(self, poll_s: float) -> None:
        """Requeue this job, where no successor could be submitted at all."""
        say(
            f"--chain: no next job could be submitted ({self.successor.late}): job {self._site.job} is requeued instead"
        )
        self._ledger.append("requeued_instead", job=self._site.job, limit=self.successor.late)
        requeue(self._site.job, poll_s)

    def exit_code(self, verdict: dict[str, Any]) -> int:
        """Return 0 when the chain carries on, else the verdict's own exit code."""
        if self.active and not self.successor.late and verdict.get("verdict") in CONTINUES:
            return 0
        code = verdict.get("exit_code", 1)
        return code if isinstance(code, int) else 1


def chain_stopped(order: ChainOrder) -> str:
    """Return which user has stopped the chain. Pure."""
    return f"the chain was stopped by {order.by or 'its user'} (resilio chain stop)"
