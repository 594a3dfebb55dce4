"""Slow nodes are named and healthy ones are not, whatever the noise: a thousand healthy checks of each kind."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from resilio_hpc.diagnose.observations import Times
from resilio_hpc.diagnose.verdict import judge
from tests.support.diagnose.fake_nodes import POLICY, FakeNodes

Draw = Callable[[random.Random], float]

# Factors on a block's time: a quiet machine, a busy one, and ones where a block now and then takes ten times as long.
NOISES: dict[str, Draw] = {
    "quiet": lambda draw: 1 + abs(draw.gauss(0, 0.01)),
    "normal": lambda draw: 1 + abs(draw.gauss(0, 0.2)),
    "lognormal": lambda draw: draw.lognormvariate(0, 0.5),
    "pareto": lambda draw: draw.paretovariate(1.5),
    "bursts": lambda draw: draw.choice([1.0, 1.0, 1.1, 3.0, 10.0]),
}


class Noisy(FakeNodes):
    """Blocks of 10 ms times noise; ``factors`` make nodes slow."""

    def __init__(self, count: int, draw: random.Random, noise: Draw, **factors: float) -> None:
        def clock(node: str, what: str) -> tuple[float, ...]:
            factor = factors.get(f"{node}_{what}", 1.0)
            return tuple(0.01 * factor * noise(draw) for _ in range(POLICY.blocks))

        super().__init__([f"n{number}" for number in range(count)], clock=clock)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("count", "checks"), [(2, 1000), (3, 1000), (4, 1000), (8, 1000), (33, 200)])
def test_no_healthy_node_is_named_in_a_thousand_checks(noise: str, count: int, checks: int) -> None:
    draw = random.Random(f"{noise}{count}")
    named = [Noisy(count, draw, NOISES[noise]).check().named("bad", "slow") for _ in range(checks)]
    assert [names for names in named if names] == []


@pytest.mark.parametrize("noise", ["quiet", "normal"])
@pytest.mark.parametrize("what", ["compute", "collective"])
@pytest.mark.parametrize("count", [3, 4, 7, 64])
def test_a_slow_node_is_named_and_nobody_else(count: int, what: str, noise: str) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        victim = f"n{draw.randrange(count)}"
        if what == "collective" and count == 3 and victim == "n2":
            continue  # the last of an odd number has no collective in the first round, by which others are measured
        result = Noisy(count, draw, NOISES[noise], **{f"{victim}_{what}": 5.0}).check()
        if what == "collective" and count < 8:
            assert set(result.slow) <= {victim}  # two or three pairs have no median to speak of
            continue
        assert result.slow == (victim,)
        assert result.rounds <= 3


def test_a_busy_machine_hides_a_little_slowness_and_no_great_one() -> None:
    found = {1.5: 0, 8.0: 0}
    for factor in found:
        for seed in range(50):
            draw = random.Random(seed)
            found[factor] += Noisy(16, draw, NOISES["lognormal"], n5_compute=factor).check().slow == ("n5",)
    assert found[8.0] >= 48
    assert found[1.5] < 25


def test_slow_once_is_not_slow() -> None:
    """A node that is slow in the first round only."""
    rounds: list[int] = []

    class Once(FakeNodes):
        def play(self, pair):  # type: ignore[no-untyped-def]
            rounds.append(len(self.history))
            late = "n3" if len(self.history) == 0 else ""
            self.clock = lambda node, what: (0.5 if node == late else 0.1,) * 5
            return super().play(pair)

    play = Once([f"n{number}" for number in range(8)])
    result = play.check()
    assert (result.outcome, result.slow, result.rounds) == ("fine", (), 2)


def test_two_kinds_of_nodes_are_not_slow_nodes() -> None:
    result = Noisy(8, random.Random(1), NOISES["quiet"], **{f"n{n}_compute": 2.0 for n in (0, 3, 5)}).check()
    assert result.slow == ()


def test_three_slow_of_eight_are_not_named_and_it_is_said() -> None:
    play = Noisy(8, random.Random(1), NOISES["quiet"], **{f"n{n}_compute": 2.0 for n in (0, 3, 5)})
    result = play.check()
    assert (result.outcome, result.slow) == ("cannot_tell", ())
    assert "3 of 8 nodes are slow" in result.why


def test_the_evidence_says_how_slow() -> None:
    result = Noisy(8, random.Random(2), NOISES["quiet"], n2_compute=3.0).check()
    (slow,) = [one for one in result.nodes if one.state == "slow"]
    assert slow.what == "compute"
    assert "3.0 times the median" in slow.evidence or "2.9 times the median" in slow.evidence
    assert slow.compute_ratio is not None and 2.8 < slow.compute_ratio < 3.2


def test_times_that_are_too_short_to_matter_name_nobody() -> None:
    play = FakeNodes([f"n{n}" for n in range(4)], clock=lambda node, _: (2.5e-4 if node == "n1" else 1e-4,) * 5)
    assert play.check().outcome == "fine"


def test_an_empty_history_names_nobody() -> None:
    result = judge(["n1", "n2"], [], POLICY, 0.0)
    assert (result.outcome, result.named("unsure")) == ("cannot_tell", ("n1", "n2"))
    assert Times().compute == ()
