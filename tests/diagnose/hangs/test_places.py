"""Ranks at the same line are one group; a group with a rank to blame comes first, and many groups are bounded."""

from __future__ import annotations

from resilio_hpc.diagnose.hangs.places import MOST_GROUPS, PlaceGroup, grouped


def test_those_to_blame_come_first_then_the_smaller_groups() -> None:
    places = dict.fromkeys(range(1024), "train.py:40") | {7: "data.py:12", 9: "save.py:3", 10: "save.py:3"}
    assert grouped(places, {1000})[0] == PlaceGroup("train.py:40", 1021, (0, 1, 2, 3, 4, 5, 6, 8))
    assert grouped(places, {7}) == [
        PlaceGroup("data.py:12", 1, (7,)),
        PlaceGroup("save.py:3", 2, (9, 10)),
        PlaceGroup("train.py:40", 1021, (0, 1, 2, 3, 4, 5, 6, 8)),
    ]


def test_there_are_few_groups_however_many_lines() -> None:
    found = grouped({rank: f"train.py:{rank}" for rank in range(1000)}, {999})
    assert len(found) == MOST_GROUPS
    assert found[0].place == "train.py:999"


def test_where_no_line_is_known_there_is_no_group() -> None:
    assert grouped({}, {3}) == []
