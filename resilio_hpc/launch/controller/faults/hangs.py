"""The controller's part for ranks that live and do not go on: seen, blamed, restarted. Pure.

``watch.step_watch`` tells that there are no steps. All agents are asked what they see of their ranks: a few times
while a step is late, and again when it is too late. ``diagnose.hangs.verdict`` judges what moved between. A certain
verdict is acted on at once, before the limit of a step, too; any other after the hang timeout.
"""

from __future__ import annotations

import math

import msgspec

from resilio_hpc.core.rank_link import LAST_CHECKPOINT
from resilio_hpc.diagnose.hangs.blame import HangKind
from resilio_hpc.diagnose.hangs.early_ends import missed
from resilio_hpc.diagnose.hangs.places import grouped
from resilio_hpc.diagnose.hangs.rank_sight import RankSight
from resilio_hpc.diagnose.hangs.verdict import HangVerdict, judge
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.intents import HangFound, Intend
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.controller.faults.limit_keeping import LimitKeeping
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.watch.step_watch import GoesOn, Stalled, StepWatch

ANSWER_S = 1.0  # seconds that agents have to answer; of thousands, more
ANSWERS_PER_S = 2000
MOST_RANKS = 64  # that an event names
FIRST_LOOK_S = 2.0  # without a step or a call; each further look before the limit comes after twice the time
SUSPECT_SHARE = 0.6  # of the limit: one look is not later, so that the one at the limit has another to compare with
LOOKS_EVERY_S = (0.2, 2.0, 10.0)  # between an answer and the next look, once the run has stalled
STACKS_EVERY_S = (0.2, 2.0, 30.0)  # the same where each look needs stacks, which interrupt what may be healthy
PAUSED_S = 1.0  # a controller that did not run for so long was stopped; so were the ranks, by scontrol suspend
STACKS = 3  # looks of a stall for which ranks write theirs
UNCERTAIN_S = 600.0  # before a restart whose reason may end by itself: torch's own limit of a collective
ENDS_EVERY_S = (5.0, 60.0)  # between two looks, at first and at most, once a rank has ended well and others run
TIMES_LONGEST = 10.0  # times the longest wait of this run that ended well


class Hangs:
    """Watches steps while all ranks run, and asks why there are none."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._watch = StepWatch()
        self.limits = LimitKeeping(run, out, self._watch.limits)
        self._untold: Stalled | None = None  # before the first step, until it is seen what ranks wait for
        self._needs_stacks = False
        self._look = -1  # the number of the last look
        self._asked: float | None = None  # when it was asked for; None: no answer is awaited
        self._next_look: float | None = None  # None: the run has not stalled
        self._certain = False  # the last look before the limit leaves no doubt
        self._early_look_s = 0.0  # the next look before the limit comes when there was nothing for so long
        self._answered: set[str] = set()
        self._sights: dict[int, RankSight] = {}
        self._before: dict[int, RankSight] = {}
        self._before_at = 0.0
        self._looks = 0  # of this stall
        self._places: dict[int, str] = {}  # the program's line of each rank, as last seen in this stall
        self._ticked = run.now()
        self._judged: tuple[object, float] = (None, 0.0)  # kind and ranks, and since when they are the same
        self._told: tuple[object, ...] | None = None  # the verdict that was recorded last
        self._ends: tuple[float, float] | None = None  # once ranks end: the next look, and the time after it
        self._sampled: tuple[int, ...] = ()  # ranks whose native stacks the next look takes, too

    def stalled_s(self) -> float | None:
        """Return for how long there has been no step, once that is too long; else None."""
        return self._watch.stalled_s(self._run.now()) if self._untold is None else None

    def tick(self) -> None:
        """Look at the steps, and at the ranks where there are none."""
        run, now = self._run, self._run.now()
        if now - self._ticked > PAUSED_S:
            self._watch.wait_again(now)
        self._ticked = now
        if run.phase is Phase.PREPARING:
            self._watch.expect(run.world_size)
        self.limits.tick(self._uncertain_s)
        if now >= self._watch.next_look:
            steps, calls, section = progress(run)
            starts = run.phase is Phase.STARTING or calls <= 0
            certain, self._certain = self._certain, False
            seen = self._watch.look(run.round, run.world_size, steps, now, calls, section, starts, certain)
            if isinstance(seen, Stalled):
                self._untold = seen
                if not seen.starts:
                    self._tell_stalled()
                self._looks, self._told, self._judged, self._places = 0, None, (None, 0.0), {}
                self._ask(now, stacks=True)
            elif isinstance(seen, GoesOn) and self._untold is None:
                self._out.record("goes_on", round=run.round, step=seen.step, waited_s=seen.waited_s)
            if steps is None and self._may_miss_ranks():
                self._look_at_ends(now)
            else:
                self._ends = None
                self._suspect(now)
        if self._asked is not None and now > self._asked + ANSWER_S + len(run.members) / ANSWERS_PER_S:
            self._judge(now)
        elif self._next_look is not None and self._asked is None and now >= self._next_look:
            self._ask(now, stacks=self._needs_stacks or self._looks < STACKS)

    def _tell_stalled(self) -> None:
        """Record that there are no steps."""
        seen, self._untold = self._untold, None
        if seen is not None:
            self._out.record(
                "stalled", round=self._run.round, step=seen.step, silent_s=seen.silent_s, limit_s=seen.limit_s,
                nodes=seen.nodes,
            )  # fmt: skip

    def _suspect(self, now: float) -> None:
        """Look before the limit, since some hangs are certain long before; forget everything when the steps go on."""
        silent_s, share_s = self._watch.silent_s(now), SUSPECT_SHARE * self._watch.limit_s
        if silent_s <= min(FIRST_LOOK_S, share_s):
            self._asked = self._next_look = self._untold = None
            self._before, self._early_look_s = {}, 0.0
        elif silent_s > self._early_look_s:
            times = (2 * max(silent_s, FIRST_LOOK_S), share_s)
            self._early_look_s = min(one for one in times if one > silent_s)
            if self._asked is None:
                self._ask(now, stacks=False)

    def _may_miss_ranks(self) -> bool:
        """Return whether some ranks have ended, and others, which run on, might wait for them."""
        run = self._run
        asked = run.stopping or run.pausing or run.config.hang_timeout_s == 0 or not run.leads
        return run.phase is Phase.RUNNING and not asked and any(agent.finishing for agent in run.agents.values())

    def _look_at_ends(self, now: float) -> None:
        """Look, more and more seldom: healthy ranks may end hours apart."""
        due, every_s = self._ends or (now + ENDS_EVERY_S[0], ENDS_EVERY_S[0])
        if now >= due and self._asked is None:
            self._ask(now, stacks=False)
            due, every_s = now + every_s, min(2 * every_s, ENDS_EVERY_S[1])
        self._ends = due, every_s

    def _ask(self, now: float, stacks: bool) -> None:
        run = self._run
        self._look += 1
        self._asked = now
        self._answered, self._sights = set(), {}
        look = m.LookAtRanks(run.epoch, run.round, self._look, stacks, self._sampled)  # one object: encoded once
        self._sampled = ()
        for member in run.members:
            self._out.send(member.node, look)

    def seen(self, message: m.RanksSeen) -> None:
        """Take an agent's answer; with the last one, judge."""
        run = self._run
        if self._asked is None or message.look != self._look or not run.is_member(message.node):
            return
        ours = {rank for member in run.members if member.node == message.node for rank in member.ranks}
        self._sights |= {sight.rank: sight for sight in message.ranks if sight.rank in ours}
        self._answered.add(message.node)
        if len(self._answered) == len(run.members):
            self._judge(run.now())

    def _judge(self, now: float) -> None:
        run = self._run
        self._asked = None
        self._places |= {rank: sight.place for rank, sight in self._sights.items() if sight.place}
        before, between_s = self._before, now - self._before_at
        self._sights = {rank: _with_join(sight, before.get(rank)) for rank, sight in self._sights.items()}
        self._before, self._before_at = self._sights, now
        silent_s = self._watch.stalled_s(now)
        if self._ends is not None:
            found = missed(self._sights, before, between_s, run.world_size)
            if found is not None:
                self._intend(HangFound(*found, run.unix() - between_s, "", kind="early_exit"))
            return
        verdict = judge(self._sights, before, between_s, run.world_size)
        if silent_s is None:
            self._certain = verdict.certain and not verdict.moves
            if not self._certain and judge(self._sights, self._sights, between_s, run.world_size).certain:
                self._early_look_s = self._watch.silent_s(now) + LOOKS_EVERY_S[0]  # certain, if it is the same then
            return
        unseen = self._untold is not None and (verdict.kind is HangKind.NONE or verdict.moves)
        self._needs_stacks = unseen or any(sight.joins for sight in self._sights.values())
        looks_every_s = STACKS_EVERY_S if self._needs_stacks else LOOKS_EVERY_S
        every_s = looks_every_s[min(self._looks, len(looks_every_s) - 1)]
        self._looks += 1
        if unseen:  # they may build a model, or read
            self._next_look = now + every_s
            return
        self._tell_stalled()
        to_limit_s = self._timeout_s(verdict) - self._lasts_s(verdict, now, silent_s)
        self._next_look = now + (min(every_s, to_limit_s) if to_limit_s > 0 else every_s)
        lasts_s = self._lasts_s(verdict, now, silent_s)
        due = not verdict.moves and (verdict.certain or lasts_s >= self._timeout_s(verdict))
        acts = due and run.config.mode is Mode.RECOVER and run.config.hang_timeout_s != 0 and run.leads
        self._tell(verdict, silent_s, due, acts)
        if acts:
            self._next_look = None
            self._intend(HangFound(
                verdict.ranks, verdict.evidence, run.unix() - silent_s, self._place(verdict), verdict.certain
            ))  # fmt: skip

    def _lasts_s(self, verdict: HangVerdict, now: float, silent_s: float) -> float:
        """Return for how long it has been so: without a step, where the user has set a limit; else the same verdict.

        Ranks that evaluate for minutes come to their next collective one after the other.
        """
        same = (verdict.kind, verdict.ranks)
        if self._judged[0] != same:
            self._judged = (same, now)
        return silent_s if self._run.config.hang_timeout_s is not None else now - self._judged[1]

    def _timeout_s(self, verdict: HangVerdict) -> float:
        """Return for how long an uncertain hang may last.

        Ranks of which none is known to wait may all compute, and a rank that waits for a disk or a file system would be
        followed by one that waits, too: neither is restarted unless the user says when.
        """
        chosen = self._run.config.hang_timeout_s
        if chosen is not None:
            return chosen
        if verdict.in_kernel or verdict.kind is HangKind.NONE:
            return math.inf
        # torch's own limit of a call would let them wait as long: one rank may prepare data while the others wait
        return max(self._uncertain_s, *(sight.may_wait_s for sight in self._before.values()), 0.0)

    @property
    def _uncertain_s(self) -> float:
        """Return for how long an uncertain hang of ranks that wait for each other may last."""
        chosen = self._run.config.hang_timeout_s
        return max(UNCERTAIN_S, TIMES_LONGEST * self._watch.longest_s) if chosen is None else chosen

    def _tell(self, verdict: HangVerdict, silent_s: float, due: bool, acts: bool) -> None:
        """Record a verdict that is new, or is acted on."""
        told = (verdict.kind, verdict.ranks, verdict.certain, verdict.moves)
        if told == self._told and not due:
            return
        if due and not acts and self._told == (*told, "due"):
            return
        self._told = (*told, "due") if due else told
        run = self._run
        if not due and not verdict.moves:  # a sample suspends a rank for a moment
            others = (rank for rank in range(run.world_size) if rank not in verdict.ranks)
            self._sampled = (*verdict.ranks[:1], next(others, 0))
        nodes = sorted({member.node for member in run.members if set(member.ranks) & set(verdict.ranks)})
        self._out.record(
            "hang", round=run.round, kind=verdict.kind.value, ranks=list(verdict.ranks[:MOST_RANKS]),
            nodes=nodes[:MOST_RANKS],
            evidence=verdict.evidence, certain=verdict.certain, moves=verdict.moves, silent_s=round(silent_s, 3),
            acted=acts, places=msgspec.to_builtins(grouped(self._places, verdict.ranks)),
            **self._follows(verdict, due),
        )  # fmt: skip

    def _follows(self, verdict: HangVerdict, due: bool) -> dict[str, float]:
        """Return when the ranks are restarted, if nothing changes."""
        limit_s = self._timeout_s(verdict)
        acts = self._run.config.mode is Mode.RECOVER and limit_s > 0 and not verdict.moves
        return {"waits_until_s": round(limit_s, 1)} if acts and not due and math.isfinite(limit_s) else {}

    def _place(self, verdict: HangVerdict) -> str:
        """Return the program's line of the first rank to blame whose line is known."""
        return next((self._places[rank] for rank in verdict.ranks if rank in self._places), "")


def _with_join(sight: RankSight, before: RankSight | None) -> RankSight:
    """Return what is seen of a rank whose stack came too late, with where it waited for its peers before."""
    if before is None or sight.place or (sight.begun, sight.completed) != (before.begun, before.completed):
        return sight
    return msgspec.structs.replace(sight, joins=before.joins, place=before.place)


def progress(run: RunState) -> tuple[dict[str, int] | None, int, str]:
    """Return steps, calls and the section of the nodes that train, in one pass: there may be thousands.

    Steps: those done on each node, -1 where they are not known; None while none are expected. Calls: how many calls of
    communication libraries were begun and completed, -1 where that is not known. Section: what a rank does beside its
    steps, "" where all do steps.
    """
    agents, starting = run.agents, run.phase is Phase.STARTING
    expected = run.with_ranks and not run.stopping and not run.pausing
    done: dict[str, int] = {}
    counts, within = 0, ""
    for member in run.members:
        agent = agents.get(member.node)
        if agent is None:
            expected = False
            continue
        if agent.calls < 0:
            counts = -1
        elif counts >= 0:
            counts += agent.calls
        within = within or agent.section
        if agent.finishing or (starting and not agent.started):
            expected = False
        done[member.node] = agent.step
    return done if expected and within != LAST_CHECKPOINT else None, counts if done else -1, within
