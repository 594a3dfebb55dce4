"""Where the ranks of a run that stands still are: those at the same line are one group. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

MOST_GROUPS = 6
MOST_RANKS = 8


class PlaceGroup(msgspec.Struct, frozen=True):
    """``count`` ranks are at ``place``, the program's line as ``train.py:88``. ``ranks``: the first of them."""

    place: str
    count: int
    ranks: tuple[int, ...]


def grouped(places: Mapping[int, str], blamed: Collection[int]) -> list[PlaceGroup]:
    """Return the groups: those with a rank to blame first, then the smaller ones, since many ranks only wait.

    ``places``: the line of each rank for which one is known.
    """
    at: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        at[place].append(rank)
    found = [PlaceGroup(place, len(ranks), tuple(ranks[:MOST_RANKS])) for place, ranks in at.items()]
    is_blamed = {place for place, ranks in at.items() if not set(ranks).isdisjoint(blamed)}
    found.sort(key=lambda group: (group.place not in is_blamed, group.count, group.place))
    return found[:MOST_GROUPS]
