"""Rounds of a pair check played without machines: nodes that are good, fail, or take their time as told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from resilio_hpc.diagnose.observations import Observation, Pair, Round, RoundOutcome, Times
from resilio_hpc.diagnose.policy import PairPolicy, pair_policy
from resilio_hpc.diagnose.result import CheckResult
from resilio_hpc.diagnose.verdict import judge, pairs_of_next_round

POLICY = pair_policy()
Clock = Callable[[str, str], tuple[float, ...]]  # node, "compute" or "collective" -> blocks


def steady(_node: str, _what: str) -> tuple[float, ...]:
    return (0.1,) * 5


@dataclass
class FakeNodes:
    """``alone``: fail by themselves; ``together``: break every collective that they are in."""

    nodes: Sequence[str]
    alone: Collection[str] = ()
    together: Collection[str] = ()
    clock: Clock = steady
    policy: PairPolicy = POLICY
    history: list[Round] = field(default_factory=list)

    def check(self) -> CheckResult:
        while pairs := pairs_of_next_round(self.nodes, self.history, self.policy):
            names = [node for pair in pairs for node in pair]
            assert len(set(names)) == len(names), "a node is in two pairs"
            assert len(self.history) < self.policy.rounds
            self.history.append(tuple(seen for pair in pairs for seen in self.play(pair)))
        return judge(self.nodes, self.history, self.policy, 0.0)

    def play(self, pair: Pair) -> list[Observation]:
        outcomes = self._outcomes(pair)
        collective = max((self.clock(node, "collective") for node in pair), key=min)
        passed = all(one is RoundOutcome.PASSED for one in outcomes.values()) and len(pair) == 2
        seen = []
        for node in pair:
            partner = next((other for other in pair if other != node), "")
            outcome = outcomes[node]
            compute = () if outcome is RoundOutcome.ALONE else self.clock(node, "compute")
            times = Times(compute, collective if passed else (), "cpu")
            fault = {RoundOutcome.ALONE: "crashed", RoundOutcome.TOGETHER: "failed"}.get(outcome)
            seen.append(Observation(node, partner, outcome, times, fault))  # type: ignore[arg-type]
        return seen

    def _outcomes(self, pair: Pair) -> Mapping[str, RoundOutcome]:
        if any(node in self.alone for node in pair):
            return {node: RoundOutcome.ALONE if node in self.alone else RoundOutcome.WAITED for node in pair}
        broken = len(pair) == 2 and any(node in self.together for node in pair)
        return dict.fromkeys(pair, RoundOutcome.TOGETHER if broken else RoundOutcome.PASSED)
