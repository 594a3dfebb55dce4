"""One to three slow nodes of 256 are isolated in a few rounds, under the noise of a cluster that others use, too."""

from __future__ import annotations

import math
import random

import pytest

from resilio_hpc.diagnose.observations import Observation, Pair
from tests.support.diagnose.fake_nodes import POLICY, FakeNodes

NODES = 256
MOST_ROUNDS = int(2 * math.log2(NODES))
COMPUTE, LINK = 1.8, 4.0  # times as long as usual: a GPU that throttles, a link at a quarter of its rate


class Cluster(FakeNodes):
    """Blocks with jitter and heavy tails; now and then a neighbour takes a block, or a node is noisy for a round."""

    def __init__(self, count: int, draw: random.Random, slow: dict[tuple[str, str], float]) -> None:
        self._draw, self._slow, self._noisy = draw, slow, ""

        def clock(node: str, what: str) -> tuple[float, ...]:
            factor = slow.get((node, what), 1.0)
            blocks = [0.01 * factor * (1 + abs(draw.gauss(0, 0.02))) for _ in range(POLICY.blocks)]
            for at in range(len(blocks)):
                if draw.random() < 0.03:
                    blocks[at] *= draw.paretovariate(1.2)
            if draw.random() < 0.05:
                blocks[draw.randrange(len(blocks))] *= 5.0
            return tuple(block * (3.0 if node == self._noisy else 1.0) for block in blocks)

        super().__init__([f"n{number}" for number in range(count)], clock=clock)

    def play(self, pair: Pair) -> list[Observation]:
        if self.history and self._noisy:
            self._noisy = ""  # in one round only
        return super().play(pair)

    def with_a_noisy_node(self) -> Cluster:
        self._noisy = self._draw.choice(list(self.nodes))
        return self


@pytest.mark.parametrize("slow", [1, 2, 3])
@pytest.mark.parametrize("what", ["compute", "collective", "both"])
def test_slow_nodes_are_isolated_exactly(slow: int, what: str) -> None:
    rounds = []
    for seed in range(10):
        draw = random.Random(f"{slow} {what} {seed}")
        victims = draw.sample([f"n{number}" for number in range(NODES)], slow)
        kinds = {"both": ("compute", "collective")}.get(what, (what,))
        factors = {(node, kind): COMPUTE if kind == "compute" else LINK for node in victims for kind in kinds}
        result = Cluster(NODES, draw, factors).with_a_noisy_node().check()
        assert set(result.slow) == set(victims), seed
        assert result.bad == ()
        rounds.append(result.rounds)
    assert max(rounds) <= 4 < MOST_ROUNDS


def test_slow_neighbours_that_are_a_pair_in_the_first_round_are_told_apart_from_the_others() -> None:
    factors = {("n6", "collective"): LINK, ("n7", "collective"): LINK, ("n40", "compute"): COMPUTE}
    result = Cluster(NODES, random.Random(5), factors).check()
    assert set(result.slow) == {"n6", "n7", "n40"}


def test_no_healthy_node_is_named_in_a_thousand_rounds() -> None:
    rounds, seed = 0, 0
    while rounds < 1000:
        seed += 1
        result = Cluster(24, random.Random(seed), {}).with_a_noisy_node().check()
        assert result.named("bad", "slow") == ()
        rounds += result.rounds


@pytest.mark.parametrize("count", [256, 1024, 4096])
def test_an_eighth_of_bad_nodes_takes_as_many_rounds_for_any_number_of_nodes(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    bad = set(random.Random(count).sample(nodes, count // 8))
    result = FakeNodes(nodes, together=bad).check()
    assert set(result.bad) == bad
    assert result.rounds <= 4
