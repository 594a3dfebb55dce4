"""Which rank or node failed first and took the others with it, from what is known of all their ends. Pure.

Three kinds of evidence, in this order: what an end says by itself (a kill, a broken GPU, an exception of the program
cannot follow from another rank's end; a closed connection can), who waited for whom, and time, as far as clocks agree.
Time alone decides between two only where their clocks cannot be that wrong. "No primary cause" is an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from resilio_hpc.diagnose.cascade.calls import CallStanding, silent_ranks, standings
from resilio_hpc.diagnose.cascade.death import ECHO, OWN, Death
from resilio_hpc.diagnose.hangs.blame import names_of

CONFIDENT = 0.7
UNCLEAR = 0.65


class CascadeVerdict(msgspec.Struct, frozen=True):
    """Where a cascade began.

    ``index``: of the death to name, also where none is the primary cause; ``rank``: -1 for a node, or where it is not
    known. ``confidence``: 0 to 1, that this is the origin.
    """

    index: int
    node: str
    rank: int
    primary: bool
    confidence: float
    evidence: str


def judge(deaths: Sequence[Death], addresses: Mapping[str, str] | None = None, world_size: int = 0) -> CascadeVerdict:
    """Return the origin of at least one death. ``addresses``: address → node.

    Takes time in proportion to the deaths.
    """
    return _Case(deaths, addresses or {}, world_size).judge()


def _surely_before(one: Death, other: Death) -> bool:
    """Return whether one end came first, however wrong the clocks are. On one node there is one clock."""
    clocks_s = 0.0 if one.node == other.node else one.clock_s + other.clock_s
    return one.latest + clocks_s < other.earliest


class _Case:
    def __init__(self, deaths: Sequence[Death], addresses: Mapping[str, str], world_size: int) -> None:
        self.deaths = deaths
        self.standings: list[CallStanding] = standings(deaths)
        self.world_size = world_size
        self.names = [[addresses[name] for name in death.named if name in addresses] for death in deaths]
        self.accused = Counter(node for index, nodes in enumerate(self.names) for node in set(nodes)
                               if node != deaths[index].node)  # fmt: skip

    def judge(self) -> CascadeVerdict:
        """Return the verdict."""
        everyone = range(len(self.deaths))
        own = [index for index in everyone if self.deaths[index].own >= OWN]
        if own:
            return self._among_own(own)
        either = [index for index in everyone if self.deaths[index].own > ECHO]
        found = self._link() or self._silent(either)
        return found or (self._among_either(either) if either else self._only_echoes())

    # -- ends that do not follow from another ------------------------------------------------------------------

    def _among_own(self, own: Sequence[int]) -> CascadeVerdict:
        first = min(own, key=lambda index: self.deaths[index].latest)
        death = self.deaths[first]
        rivals = [index for index in own if self._rivals(index, first)]
        if rivals and death.same and self._is_common(first, rivals):
            count = 1 + len(rivals)
            said = f"the same error on {count} ranks at about the same time: the program or its data, no single rank"
            return self._answer(first, 0.5, said, primary=False)
        if rivals:
            other = self.deaths[rivals[0]]
            said = f"{_name(death)} ({death.says}) and {_name(other)} ({other.says}) failed by themselves, "
            said += "and the clocks do not tell which came first"
            return self._answer(first, 0.5, said, primary=False)
        earlier = [i for i, one in enumerate(self.deaths) if one.own < OWN and _surely_before(one, death)]
        if earlier:
            return self._after_others(first, earlier)
        said = f"{_name(death)}: {death.says}{self._besides(first)}"
        # an end without words may be a cause of its own, too, unless it had gone on to calls that others never entered
        perhaps = [index for index, one in enumerate(self.deaths) if ECHO < one.own < OWN]
        unclear = any(not self.standings[index].ahead and self._rivals(index, first) for index in perhaps)
        return self._answer(first, min(death.own, UNCLEAR) if unclear else death.own, said)

    def _first(self, indices: Sequence[int]) -> int:
        """Return the one that waited for no other, then the earliest."""
        return min(indices, key=lambda i: (self.standings[i].waited, self.deaths[i].latest))

    def _rivals(self, index: int, first: int) -> bool:
        """Return whether this end is as good a cause as the first: perhaps as early, and of another node."""
        one, best = self.deaths[index], self.deaths[first]
        return one.node != best.node and not _surely_before(best, one)

    def _is_common(self, first: int, rivals: Sequence[int]) -> bool:
        return all(self.deaths[index].same == self.deaths[first].same for index in rivals)

    def _after_others(self, first: int, earlier: Sequence[int]) -> CascadeVerdict:
        """Return the verdict where other ranks had surely ended before the one that cannot be an echo."""
        death = self.deaths[first]
        either = [index for index in earlier if self.deaths[index].own > ECHO]
        if either:
            best = self._first(either)
            said = f"{_name(self.deaths[best])}: {self.deaths[best].says}, before {_name(death)} ({death.says})"
            return self._answer(best, 0.6, said)
        said = f"{_name(death)}: {death.says}, but {len(earlier)} others had ended before; what ended them is not known"
        return self._answer(first, 0.4, said, primary=False)

    # -- ends that may follow from another ---------------------------------------------------------------------

    def _link(self) -> CascadeVerdict | None:
        """Return whose link broke: transfers to it failed while no rank of its node had ended.

        Both ends of a link say the same. Where one transfer is all that failed, it is not known which end is at fault.
        """
        first_end: dict[str, Death] = {}
        for death in self.deaths:
            if death.node not in first_end or death.earliest < first_end[death.node].earliest:
                first_end[death.node] = death
        failed: dict[str, list[int]] = {}
        for index, death in enumerate(self.deaths):
            for node in set(self.names[index]) - {death.node} if death.link else ():
                if node not in first_end or _surely_before(death, first_end[node]):
                    failed.setdefault(node, []).append(index)
        if not failed:
            return None
        node = max(failed, key=lambda name: (len(failed[name]), name))
        count = len(failed[node])
        there = [index for index, death in enumerate(self.deaths) if death.node == node]
        index = self._first([i for i in there if self.deaths[i].link] or there or failed[node])
        rank = self.deaths[index].rank if there else -1
        if count > 1 and all(len(namers) < count for name, namers in failed.items() if name != node):
            said = f"transfers of {count} ranks to {node} failed before any rank there had ended"
            return CascadeVerdict(index, node, rank, True, 0.65, said)
        other = self.deaths[failed[node][0]].node
        said = f"a transfer between {other} and {node} failed: either end, or the network between them"
        return CascadeVerdict(index, node, rank, False, 0.4, said)

    def _silent(self, either: Sequence[int]) -> CascadeVerdict | None:
        """Return the rank or node that others waited for, and that said nothing."""
        nodes = {death.node for death in self.deaths}
        gone = [(node, count) for node, count in self.accused.most_common(3) if node not in nodes]
        first = self._first(either or range(len(self.deaths)))
        if gone and gone[0][1] * 2 > sum(self.accused.values()):
            node, count = gone[0]
            said = f"{count} of {len(self.deaths)} errors name {node}, of which nothing was heard"
            return CascadeVerdict(first, node, -1, True, 0.75 if count > 1 else 0.6, said)
        silent = silent_ranks(self.deaths, self.world_size) if not any(death.link for death in self.deaths) else None
        if silent is None or len(silent) > 1:
            return None
        (rank,) = silent
        free = [index for index in either if self.standings[index].awaited]
        if free:
            return None
        said = f"{names_of([rank])} said nothing, and all that ended may have waited for it"
        return CascadeVerdict(first, "", rank, True, 0.6, said)

    def _among_either(self, either: Sequence[int]) -> CascadeVerdict:
        most = max((self.standings[index].share for index in either), default=0.0)
        awaited = [index for index in either if self.standings[index].awaited and self.standings[index].share == most]
        accused = {index: self.accused[self.deaths[index].node] for index in awaited or either}
        named = [index for index, count in accused.items() if count > 1 and count == max(accused.values())]
        first = self._first(named or awaited or either)
        death = self.deaths[first]
        sure = 0.4 + 0.1 * (bool(awaited) + bool(named) + self._is_first(first))
        if any(one.link for one in self.deaths) and not (
            awaited or death.latest == min(one.latest for one in self.deaths)
        ):
            said = (
                f"transfers failed, and no end says why; {_name(death)} ({death.says}) is the first that may be its own"
            )
            return self._answer(first, 0.4, said, primary=False)
        return self._answer(first, sure, f"{_name(death)}: {death.says}{self._besides(first)}")

    def _only_echoes(self) -> CascadeVerdict:
        awaited = [index for index, one in enumerate(self.standings) if one.awaited]
        first = self._first(awaited or range(len(self.deaths)))
        if len(awaited) == 1:
            said = f"all errors read like another one's end; {_name(self.deaths[first])} is the one waited for"
            return self._answer(first, 0.6, said)
        said = "all errors read like another one's end; what ended first is not known"
        return self._answer(first, 0.3, said, primary=False)

    # -- words -------------------------------------------------------------------------------------------------

    def _is_first(self, first: int) -> bool:
        one = self.deaths[first]
        return all(_surely_before(one, other) for i, other in enumerate(self.deaths) if i != first)

    def _besides(self, first: int) -> str:
        others = len(self.deaths) - 1
        said = []
        if self.standings[first].awaited:
            said.append(f"others waited for it in {self.standings[first].awaited_in}")
        if others:
            ended = f"{others} {'other' if others == 1 else 'others'} ended"
            said.append(f"{ended} later" if self._is_first(first) else f"{ended} at about the same time")
        return f"; {', '.join(said)}" if said else ""

    def _answer(self, index: int, confidence: float, said: str, primary: bool = True) -> CascadeVerdict:
        death = self.deaths[index]
        return CascadeVerdict(index, death.node, death.rank, primary, round(confidence, 2), said)


def _name(death: Death) -> str:
    return f"rank {death.rank} on {death.node}" if death.rank >= 0 else death.node
