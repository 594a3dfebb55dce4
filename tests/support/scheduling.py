"""Which worker runs which tests, in which order, and which tests are in a part of ``make test-all``.

A unit is what one worker runs in a row: a test on Slurm, since it waits, or a file of other tests, which share their
fixtures. The longest units come first, so that no worker is left with one at the end. Units on Slurm, which wait, and
others, which compute, are mixed, so that processors are never idle, nor asked for by all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xdist.scheduler import LoadScopeScheduling

ALONE = "tests/on_slurm/"
"""Tests below are units of their own."""

USUAL_S = 0.02
USUAL_ON_SLURM_S = 10.0
"""Of a test that is recorded nowhere."""


class UnitScheduling(LoadScopeScheduling):
    """Gives units out in the order in which they were collected."""

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """Return the unit of a test."""
    return nodeid if nodeid.startswith(ALONE) else nodeid.partition("::")[0]


def units(tests: Sequence[str], seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the tests' units with their seconds, the longest first. Pure."""
    found: dict[str, float] = defaultdict(float)
    for test in tests:
        found[unit_of(test)] += seconds.get(test, USUAL_ON_SLURM_S if test.startswith(ALONE) else USUAL_S)
    return sorted(found.items(), key=lambda unit: (-unit[1], unit[0]))


def mixed(found: Sequence[tuple[str, float]]) -> list[str]:
    """Return units in an order in which those on Slurm and the others advance alike. Pure."""
    order: list[tuple[float, str]] = []  # how much of its kind has been given out before a unit
    for on_slurm in (True, False):
        alike = [(unit, seconds) for unit, seconds in found if unit.startswith(ALONE) is on_slurm]
        whole, given = sum(seconds for _, seconds in alike) or 1.0, 0.0
        for unit, seconds in alike:
            order.append((given / whole, unit))
            given += seconds
    return [unit for _, unit in sorted(order, key=lambda entry: entry[0])]


def in_order(tests: Sequence[str], seconds: Mapping[str, float]) -> list[int]:
    """Return the tests' positions in the order of their units. Pure."""
    place = {unit: number for number, unit in enumerate(mixed(units(tests, seconds)))}
    return sorted(range(len(tests)), key=lambda position: (place[unit_of(tests[position])], position))


def part(text: str) -> tuple[int, int]:
    """Return the part and their number from ``2/4``. Raises ValueError."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"part {text!r}: give K/N with K from 1 to N, such as 1/4")
    return int(number), int(count)


def of_part(tests: Sequence[str], number: int, count: int) -> set[str]:
    """Return the units of part ``number`` of ``count``: every ``count``-th by name, whatever was measured meanwhile.

    Neighbours by name, such as the drills, take about as long, and come into different parts. Pure.
    """
    return set(sorted({unit_of(test) for test in tests})[number - 1 :: count])


def rooms(tests: Iterable[str]) -> dict[str, int]:
    """Return how many tests each folder of tests has. Pure."""
    found: dict[str, int] = defaultdict(int)
    for test in tests:
        found["/".join(test.partition("::")[0].split("/")[1:-1]) or "tests"] += 1
    return dict(sorted(found.items()))
