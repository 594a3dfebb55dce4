"""What a drill's proofs find, and that what they find fails it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults_campaign import SUBJECTS, campaign
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.ledger import Event
from resilio_hpc.drills.acts import roles_of
from resilio_hpc.drills.enough import enough
from resilio_hpc.drills.judge import commits_repeated, judge, rounds_overlap, two_at_once
from resilio_hpc.drills.kind import Act, Drill
from resilio_hpc.drills.script import counting
from resilio_hpc.drills.stamps import (
    Life,
    first_end_after,
    longest_pause,
    overlap,
    read_lives,
    steps_between,
    steps_left_out,
)
from resilio_hpc.drills.table import DRILLS, drill_named


def stamp(root: Path, node: str, token: str, round_number: int, lines: str) -> None:
    directory = root / node
    directory.mkdir(exist_ok=True)
    (directory / f"{token}.1.{round_number}.0.{len(list(directory.iterdir()))}").write_text(lines)


def lives_of(root: Path) -> list[Life]:
    return read_lives([("n1", root / "n1"), ("n2", root / "n2"), ("n3", root / "n3")])


def test_rounds_that_follow_each_other_do_not_overlap(tmp_path: Path) -> None:
    stamp(tmp_path, "n1", "aa", 0, "a -1 9.0\nb 0 10.0\ne 0 10.5\na -1 11.0\n")
    stamp(tmp_path, "n2", "aa", 0, "b 0 10.1\ne 0 10.6\nb 1 11.2\na -1 11.")  # torn by a power cut
    stamp(tmp_path, "n1", "bb", 1, "a -1 11.1\nb 1 12.0\ne 1 12.5\n")
    lives = lives_of(tmp_path)
    assert [(life.round, life.nodes) for life in lives] == [(0, {"n1", "n2"}), (1, {"n1"})]
    assert overlap(lives) == ""
    assert first_end_after(lives, 11.0) == 12.5
    assert longest_pause(lives) == pytest.approx(1.9)
    assert steps_between(lives, 10.0, 12.6) == 2


@pytest.mark.parametrize("sign", ["b 2 12.1\n", "e 1 12.1\n", "a -1 12.1\n"])
def test_any_sign_of_an_older_round_after_a_newer_ones_first_step_is_found(tmp_path: Path, sign: str) -> None:
    stamp(tmp_path, "n1", "aa", 0, "b 0 10.0\n" + sign)
    stamp(tmp_path, "n2", "bb", 1, "b 0 12.0\n")
    assert "round 0 of epoch 1 was alive on n1 0.100 s after round 1 of epoch 1" in overlap(lives_of(tmp_path))


def test_two_worlds_with_one_round_number_are_found(tmp_path: Path) -> None:
    stamp(tmp_path, "n1", "aa", 1, "b 0 10.0\n")
    stamp(tmp_path, "n2", "bb", 1, "b 0 12.0\n")
    assert "numbers must grow" in overlap(lives_of(tmp_path))


def test_the_ledger_shows_ranks_that_start_beside_others() -> None:
    started = [
        Event(1.0, "w", "ranks", {"node": "n1", "round": 0}),
        Event(2.0, "w", "ranks", {"node": "n1", "round": 1}),
    ]
    stopped = Event(1.5, "w", "ranks_stopped", {"node": "n1"})
    assert "beside" in rounds_overlap(started)
    assert rounds_overlap([started[0], stopped, started[1]]) == ""


def test_a_step_that_nobody_did_is_found(tmp_path: Path) -> None:
    stamp(tmp_path, "n1", "aa", 0, "b 0 10.0\ne 0 10.5\n")
    stamp(tmp_path, "n2", "bb", 1, "b 1 11.0\ne 1 11.5\n")
    assert steps_left_out(lives_of(tmp_path)) == ""
    stamp(tmp_path, "n3", "cc", 2, "b 3 12.0\ne 3 12.5\n")
    assert "step 2 was never done" in steps_left_out(lives_of(tmp_path))


def committed(at: float, step: int, writer: str = "7-n1", epoch: int = 1) -> Event:
    return Event(at, writer, "committed", {"step": step, "epoch": epoch})


def test_a_step_that_became_durable_twice_is_found() -> None:
    assert commits_repeated([committed(1.0, 5), committed(2.0, 10)]) == ""
    assert "step 5 was committed after step 5" in commits_repeated([committed(1.0, 5), committed(2.0, 5, "7-n2")])


def test_a_controller_that_was_stopped_may_record_late_what_was_durable_before() -> None:
    newer = [committed(1.0, 5), committed(2.0, 10, "7-n2", epoch=2)]
    assert commits_repeated([*newer, committed(3.0, 8, epoch=1)]) == ""
    assert "step 8 was committed after step 10" in commits_repeated([*newer, committed(3.0, 8, "7-n2", epoch=2)])


def test_training_that_goes_back_behind_a_durable_step_is_found() -> None:
    start = Event(2.0, "7-n1", "start", {"round": 1})
    commits = [committed(1.0, 10), committed(2.5, 15, "7-n2")]  # the second one came too late for this start
    first_step = Event(3.0, "7-n1", "first_step", {"round": 1, "restored": 10})
    assert commits_repeated([*commits, start, first_step]) == ""
    behind = Event(3.0, "7-n1", "first_step", {"round": 1, "restored": 5})
    assert "step 10 was durable" in commits_repeated([*commits, start, behind])


def test_a_round_without_stamps_proves_nothing(tmp_path: Path) -> None:
    stamp(tmp_path, "n1", "aa", 0, "b 0 10.0\ne 0 10.5\n")
    told = [Event(1.0, "7-n1", "first_step", {"round": number, "restored": -1}) for number in (0, 1)]
    assert two_at_once(told[:1], lives_of(tmp_path)) == ""
    assert "no stamps of round 1" in two_at_once(told, lives_of(tmp_path))


def test_a_forged_second_world_fails_a_drill_that_is_right_otherwise(tmp_path: Path) -> None:
    """Both halves of a cut train: verdict and result are right, and only the stamps of n2 betray the other world."""
    stamp(tmp_path, "n2", "cc", 0, "b 0 9.9\ne 0 10.3\n")
    with pytest.raises(ResilioError, match="was alive on n2"):
        judged(tmp_path, Drill("d", kinds=("rank_killed",), steps=10, world_size=6), "completed", RIGHT, 6)


GROWN = (
    Event(1.0, "7-supervisor-main", "launch", {}),
    Event(9.0, "7-n1", "recovered", {"kind": "node_lost"}),
    Event(11.0, "7-n1", "round", {"round": 2, "world_size": 6}),
    Event(12.0, "7-n1", "first_step", {"round": 2}),
)
GROWS = Drill("d", (Act("partition"), Act("heal")), ("node_lost",), world_size=6)


def test_a_drill_has_seen_enough_once_it_trains_as_it_should() -> None:
    assert enough(GROWS, GROWN, [5.0, 10.0], 14.0)


@pytest.mark.parametrize(
    ("drill", "events", "acts_at", "now"),
    [
        (GROWS, GROWN, [5.0], 14.0),  # not all was done to it
        (GROWS, GROWN, [5.0, 10.0], 12.5),  # it has hardly begun
        (GROWS, GROWN[:3], [5.0, 10.0], 14.0),  # it does not train yet
        (GROWS, (*GROWN, Event(13.0, "7-n1", "round", {"world_size": 6})), [5.0, 10.0], 20.0),  # nor any more
        (GROWS, (GROWN[0], *GROWN[2:]), [5.0, 10.0], 14.0),  # the fault was not seen
        (Drill("d", GROWS.acts, world_size=8), GROWN, [5.0, 10.0], 14.0),
        (Drill("d", GROWS.acts, jobs=2), GROWN, [5.0, 10.0], 14.0),
        (Drill("d", GROWS.acts, verdict="cancelled"), GROWN, [5.0, 10.0], 14.0),
        (Drill("d", (Act("kill_rank"),)), GROWN, [13.0], 20.0),
        (Drill("d"), GROWN, [], 20.0),
    ],
)
def test_a_drill_goes_on_until_then(drill: Drill, events: tuple[Event, ...], acts_at: list[float], now: float) -> None:
    assert not enough(drill, events, acts_at, now)


def test_the_campaign_names_drills_that_exist_and_each_subject_has_one() -> None:
    names = {drill.name for drill in DRILLS}
    assert {name for chosen in SUBJECTS.values() for name in chosen} <= names
    assert all(SUBJECTS.values())
    assert len(campaign()) == len({drill.full_name for drill in campaign()})


def test_what_counts_as_the_loss_of_a_node() -> None:
    assert drill_named("one node cut off").node_level
    for name in ("rank SIGKILL", "a joiner replaces a lost node", "batch host power cut, chain", "scancel"):
        assert not next(drill for drill in DRILLS if drill.name == name).node_level


def test_the_count_does_not_depend_on_the_number_of_ranks() -> None:
    for world_size in (1, 2, 4, 6, 8, 30):
        assert sum(counting.weight(rank, world_size) for rank in range(world_size)) == counting.weight(0, 1)
    assert counting.expected(2) == (300 % counting.MODULUS) * 300 % counting.MODULUS + 1


def judged(tmp_path: Path, drill: Drill, verdict: str, value: int, world_size: int) -> None:
    (tmp_path / "verdict.json").write_text(json.dumps({"verdict": verdict}))
    (tmp_path / "result").write_text(json.dumps({"values": [value], "world_size": world_size, "steps": 10}))
    events = [
        Event(1.0, "7-supervisor-main", "launch", {}),
        Event(2.0, "7-n1", "recovered", {"kind": "rank_killed"}),
    ]
    stamp(tmp_path, "n1", "aa", 0, "b 0 10.0\ne 0 10.5\n")
    judge(drill, events, lives_of(tmp_path), tmp_path, tmp_path / "result", [1.0, 2.0])


RIGHT = counting.expected(10)


def test_a_right_run_passes(tmp_path: Path) -> None:
    judged(tmp_path, Drill("d", kinds=("rank_killed",), steps=10, world_size=6), "completed", RIGHT, 6)


@pytest.mark.parametrize(
    ("drill", "verdict", "value", "world_size", "said"),
    [
        (Drill("d", steps=10), "no_progress", RIGHT, 6, "the verdict is no_progress"),
        (Drill("d", steps=10), "completed", RIGHT + 1, 6, "lost, doubled or torn"),
        (Drill("d", steps=10, world_size=6), "completed", RIGHT, 4, "4 ranks finished"),
        (Drill("d", kinds=("node_lost",), steps=10), "completed", RIGHT, 6, "none of node_lost"),
        (Drill("d", jobs=2, steps=10), "completed", RIGHT, 6, "1 job"),
        (Drill("d", steps_meanwhile=1, steps=10), "completed", RIGHT, 6, "0 steps were done during the fault"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, drill: Drill, verdict: str, value: int, world_size: int, said: str
) -> None:
    with pytest.raises(ResilioError, match=said):
        judged(tmp_path, drill, verdict, value, world_size)


def test_roles_spare_the_batch_host_where_they_can() -> None:
    roles = roles_of(["n1", "n2", "n3", "n4"], leader="n2", batch_host="n1")
    assert roles["follower"] == ("n3",)
    assert roles["follower2"] == ("n4",)
    assert set(roles["apart"]) == {"n3", "n4"}
    assert set(roles["with_leader"]) == {"n1", "n2"}
    assert roles_of(["n1", "n2"], leader="n1", batch_host="n1")["follower"] == ("n2",)


def test_drills_have_names_of_their_own() -> None:
    names = [drill.full_name for drill in DRILLS]
    assert len(names) == len(set(names))
