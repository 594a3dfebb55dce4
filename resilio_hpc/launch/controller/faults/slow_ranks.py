"""The controller's part for ranks that train, but slower than before and than the others. Pure.

Agents report how their ranks spend each window of time. ``watch.slow_ranks`` finds who became slower, and
``diagnose.slow.causes`` why. It is recorded once, and once more when it is over.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from resilio_hpc.diagnose.slow import causes
from resilio_hpc.diagnose.slow.causes import CauseFound, RankPlace, SlowCause
from resilio_hpc.diagnose.slow.rank_facts import WINDOW_S, NodeFacts, RankWindow
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.intents import Intend, PauseAndTest
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.watch.slow_ranks import Slowdown, SlowWatch, WorkDone

LATE_S = 3.0  # after a window: what did not come by then is left out
MOST_WAITING = 4  # windows
KEPT = 6  # windows, as evidence
MOST_RANKS = 64  # that an event names
LOOK = 1 << 40  # numbers of looks from here on are this part's
LOOKS, LOOK_S = 12, 0.7
MOST_LOOKED_AT = 8  # suspects
PEERS = 16  # whose facts a suspect's are compared with


class SlowRanks:
    """Collects windows of the present round."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self.told: list[dict[str, Any]] = []  # events that are not over
        self._begin()

    def _begin(self) -> None:
        self._round = self._run.round
        layout = self._run.config.roles
        gpu = self._run.config.plan.gpu_among([member.node for member in self._run.members])
        self._watch = SlowWatch(lambda rank: layout(gpu, rank, self._run.world_size))
        self._waiting: dict[int, dict[str, m.RankTimes]] = {}
        self._came: dict[int, float] = {}
        self._last = -1
        self._ranks: dict[int, deque[RankWindow]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._nodes: dict[str, deque[NodeFacts]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._places: dict[int, RankPlace] = {}
        self._looks, self._next_look = 0, 0.0

    def take(self, message: m.RankTimes) -> None:
        """Take a node's window."""
        run = self._run
        if run.phase is not Phase.RUNNING or run.stopping or not run.is_member(message.node):
            return
        if run.round != self._round:
            self._over("the ranks were restarted")
            self._begin()
        if message.window <= self._last or (len(self._waiting) > MOST_WAITING and message.window not in self._waiting):
            return
        self._waiting.setdefault(message.window, {})[message.node] = message
        self._came.setdefault(message.window, run.now())

    def tick(self) -> None:
        """Judge the windows that are whole, or late."""
        run = self._run
        self._look()
        for window in sorted(self._waiting):
            if len(self._waiting[window]) < len(run.members) and run.now() < self._came[window] + LATE_S:
                return
            came = self._waiting.pop(window)
            self._came.pop(window)
            self._last = window
            if run.round == self._round:
                self._judge(came)

    def _look(self) -> None:
        """Ask where suspects are, a few times, while they are suspects."""
        run, suspects = self._run, self._watch.suspects
        if not suspects or run.round != self._round:
            self._looks, self._places = 0, {}
        elif self._looks < LOOKS and run.now() >= self._next_look:
            self._looks, self._next_look = self._looks + 1, run.now() + LOOK_S
            for node in dict.fromkeys(self._node_of(rank) for rank in suspects[:MOST_LOOKED_AT]):
                self._out.send(node, m.LookAtRanks(run.epoch, run.round, LOOK + self._looks, True))

    def seen(self, message: m.RanksSeen) -> None:
        """Take where ranks are; those that wait in a call do not count."""
        for sight in message.ranks if message.look > LOOK else ():
            if sight.begun == sight.completed and sight.place:
                known = self._places.setdefault(sight.rank, RankPlace())
                known.looks += 1
                known.loads += bool(sight.within)
                if sight.within or not known.loads:
                    known.place = sight.place

    def _judge(self, came: dict[str, m.RankTimes]) -> None:
        works: dict[int, WorkDone] = {}
        for member in self._run.members:
            message = came.get(member.node)
            if message is None or len(message.ranks) != len(member.ranks):
                continue
            self._nodes[member.node].append(message.facts)
            for rank, facts in zip(member.ranks, message.ranks, strict=True):
                self._ranks[rank].append(facts)
                works[rank] = _work(facts)
        if not all(rank_is_measured(self._ranks[rank][-1]) for rank in works):
            works = {rank: WorkDone(0.0, WINDOW_S, work.calls, work.steps) for rank, work in works.items()}
        if works:
            self._tell(self._watch.look(works))

    # -- what is recorded --------------------------------------------------------------------------------------

    def _tell(self, found: list[Slowdown]) -> None:
        for change in [one for one in found if one.over]:
            self._end(change.rank, change.what)
        by_node: dict[tuple[str, str], list[Slowdown]] = defaultdict(list)
        for change in [one for one in found if not one.over]:
            by_node[self._node_of(change.rank), change.what].append(change)
        for (node, what), changes in by_node.items():
            self._record(node, what, changes)

    def _record(self, node: str, what: str, changes: list[Slowdown]) -> None:
        run = self._run
        worst = max(changes, key=lambda change: change.ratio)
        ranks = tuple(change.rank for change in changes if change.rank >= 0)
        nodes = (node,) if node else ()
        cause = self._cause(worst)
        if worst.rank < 0 and (found := self._node_at_fault(what)) is not None:
            nodes, cause = (found[0],), found[1]
            ranks = tuple(rank for member in run.members if member.node == found[0] for rank in member.ranks)
        certain = bool(ranks) and cause.cause is not SlowCause.UNKNOWN and not worst.since_start
        acts = certain and run.config.slow_ranks == "act" and run.config.mode is Mode.RECOVER and run.leads
        since = run.unix() - WINDOW_S * (worst.windows + 1)
        event: dict[str, Any] = {
            "round": run.round, "ranks": list(ranks[:MOST_RANKS]), "nodes": list(nodes), "what": what,
            "ratio": round(worst.ratio, 2), "cost": round(worst.cost, 3), "cause": cause.cause.value,
            "evidence": cause.evidence, "since": round(since, 1), "since_start": worst.since_start,
            "certain": certain, "acted": acts,
        }  # fmt: skip
        self.told.append(event)
        self._out.record("slow", **event)
        if acts:
            self._intend(PauseAndTest(cause.evidence, replace=True))

    def _node_at_fault(self, what: str) -> tuple[str, CauseFound] | None:
        """Return the node that slows all ranks down, where no rank's own work is known to be slow."""
        link = causes.of_link(self._nodes, self._run.node) if what == "link" else None
        return link or causes.of_gpus(self._nodes)

    def _cause(self, change: Slowdown) -> CauseFound:
        if change.rank < 0:
            return CauseFound(SlowCause.UNKNOWN, "all ranks are, and none stands out")
        if change.what == "link":
            return CauseFound(SlowCause.LINK, "its large transfers take longer than those of the others")
        mine = list(self._ranks[change.rank])
        others = sorted(rank for rank in self._ranks if rank not in self._watch.suspects and rank != change.rank)
        step = max(1, len(others) // PEERS)
        peers = [facts for rank in others[::step][:PEERS] for facts in self._ranks[rank]]
        own = causes.of_rank(mine, peers, 1 - 1 / change.ratio, self._places.get(change.rank))
        gpus = causes.of_gpus(self._nodes) if own.cause is SlowCause.UNKNOWN else None
        return gpus[1] if gpus is not None and gpus[0] == self._node_of(change.rank) else own

    def _end(self, rank: int, what: str) -> None:
        """End what was told of a rank; of all of them (-1), what was told without a rank's own work."""
        for event in self.told[:]:
            if (rank in event["ranks"] and what == event["what"]) or (rank < 0 and event["what"] != "own"):
                self._record_end(event)

    def _over(self, reason: str) -> None:
        """End all that was told: another round begins, which is learned again."""
        for event in self.told[:]:
            self._record_end(event, reason)

    def _record_end(self, event: dict[str, Any], reason: str = "") -> None:
        self.told.remove(event)
        lasted_s = round(self._run.unix() - event["since"], 1)
        ended = {name: event[name] for name in ("ranks", "nodes", "what", "cause")}
        self._out.record("slow_over", round=self._round, **ended, lasted_s=lasted_s, reason=reason)

    def _node_of(self, rank: int) -> str:
        return next((member.node for member in self._run.members if rank in member.ranks), "")


def rank_is_measured(facts: RankWindow) -> bool:
    """Return whether the calls of a rank are seen, so that its own work is known."""
    return facts.own >= 0


def _work(facts: RankWindow) -> WorkDone:
    return WorkDone(max(0, facts.own) / 1000, facts.wait / 1000, facts.calls, facts.steps, 1000.0 * facts.rate)
