"""Campaigns: what is drawn, what became of the time by stamps, whose bits are compared, and the file of results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.campaign_faults import FAULTS, FaultDraw, chosen
from resilio_hpc.drills.campaign_file import CampaignFile, summary
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.campaign_result import CampaignResult, StruckFault
from resilio_hpc.drills.stamped_time import StampedTime, differences, read_digests, repeated_after, stamped_time
from resilio_hpc.drills.stamps import Life, repeated_steps

# Ranks do steps 0 to 3 of a second each, lose step 3's work, wait until 20, and do steps 3 to 5.
BEFORE = Life("a", 1, 0, {"n1"}, 10.0, 14.0, "n1", [(11.0, 0), (12.0, 1), (12.5, 2), (13.0, 2), (14.0, 3)])
AFTER = Life("b", 1, 1, {"n1"}, 20.0, 23.0, "n1", [(21.0, 3), (22.0, 4), (23.0, 5)])


def test_a_step_counts_when_it_was_done_for_the_last_time() -> None:
    found = stamped_time([BEFORE, AFTER], began=5.0)
    assert (found.wall_s, found.startup_s, found.useful_s, found.repeated_s) == (18.0, 5.0, 6.0, 1.0)
    assert (found.steps, found.repeated_steps) == (6, 1)
    assert found.goodput == pytest.approx(6 / 18)
    assert found.lost_s == pytest.approx(18 - 5 - 6 - 1)
    assert repeated_steps([BEFORE, AFTER]) == 1
    assert repeated_after([BEFORE, AFTER], 14.0) == 1
    assert repeated_after([BEFORE, AFTER], 30.0) is None


def test_without_a_stamp_there_is_no_goodput() -> None:
    found = stamped_time([], began=5.0)
    assert (found.goodput, found.steps, found.lost_s) == (0.0, 0, 0.0)


def test_faults_come_at_the_mean_time_and_as_often_as_their_weights_say() -> None:
    draw = FaultDraw("1 0", 60.0, chosen({"rank killed": 3.0, "node loses power": 1.0}, fuse=False))
    assert mean(draw.gap_s() for _ in range(5000)) == pytest.approx(60.0, rel=0.05)
    names = [fault.name for _ in range(4000) if (fault := draw.fault(may_take_node=True)) is not None]
    assert names.count("rank killed") / len(names) == pytest.approx(0.75, abs=0.03)
    drawn = [draw.fault(may_take_node=False) for _ in range(50)]
    assert {fault.name for fault in drawn if fault is not None} == {"rank killed"}


def test_where_only_nodes_may_be_taken_and_none_may_nothing_is_drawn() -> None:
    assert FaultDraw("1", 1.0, chosen({"node cut off": 1.0}, fuse=False)).fault(may_take_node=False) is None


def test_the_same_seed_draws_the_same_and_another_part_others() -> None:
    def drawn(seed: str) -> list[float]:
        draw = FaultDraw(seed, 60.0, chosen(None, fuse=False))
        return [draw.gap_s() for _ in range(5)]

    assert drawn("7 0") == drawn("7 0") != drawn("7 1")


def test_a_directory_that_cannot_hang_is_not_drawn() -> None:
    assert all(not fault.needs_fuse for fault in chosen(None, fuse=False))
    assert set(chosen(None, fuse=True)) == set(FAULTS)
    with pytest.raises(UsageError, match="no fault 'rank eaten'"):
        chosen({"rank eaten": 1.0}, fuse=True)


def test_bits_are_compared_after_every_step_that_both_did(tmp_path: Path) -> None:
    for name, text in (("mine", "0 aa\n1 bb\n1 bb\n2 c"), ("twin", "0 aa\n1 bb\n2 cc\n3 dd\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "life.1").write_text(text)
    mine, twin = read_digests([tmp_path / "mine", tmp_path / "absent"]), read_digests([tmp_path / "twin"])
    assert differences(mine, twin) == (2, [])
    (tmp_path / "mine" / "life.2").write_text("1 xx\n")  # a later life computed step 1 in another way
    assert differences(read_digests([tmp_path / "mine"]), twin) == (2, [1])


def result_of(seconds: float, wrong: str = "", interrupted: bool = False) -> CampaignResult:
    fault = StruckFault("rank killed", 100.0, "n1", 3, False, True, 0.5, 2)
    return CampaignResult(
        faults=(fault, fault), seconds=seconds, stamped=StampedTime(seconds, 0.0, seconds / 2, 0.0, 10, 4),
        goodput=0.5, ledger_goodput=None, twin_goodput=0.9, twin_ledger_goodput=0.9, relative=0.6,
        lost_per_fault_s=1.0, compared=10, lives=3, wrong=wrong, interrupted=interrupted,
    )  # fmt: skip


PLAN = CampaignPlan(mtbf_s=10.0, duration_s=100.0, weights={"rank killed": 1.0})


def test_a_file_of_results_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    first = CampaignFile(path, PLAN)
    assert (first.part, first.left_s) == (0, 100.0)
    first.begin()
    first.struck(StruckFault("rank killed", 1.0, "n1", 0, False))
    first.ended(result_of(30.0, interrupted=True))
    with path.open("a") as file:
        file.write('{"v": 1, "part": 0, "ki')  # killed in the middle of a line
    again = CampaignFile(path, PLAN)
    assert (again.part, again.left_s) == (1, 70.0)
    assert len(again.parts()) == 1


def test_a_part_that_was_killed_leaves_its_faults_and_draws_others_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    first = CampaignFile(path, PLAN)
    first.begin()
    first.struck(StruckFault("rank killed", 1.0, "n1", 0, False))
    again = CampaignFile(path, PLAN)
    assert (again.part, again.left_s, len(again.rows)) == (1, 100.0, 2)


def test_a_file_of_another_campaign_or_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    CampaignFile(path, PLAN).begin()
    with pytest.raises(UsageError, match="another campaign"):
        CampaignFile(path, CampaignPlan(mtbf_s=11.0, duration_s=100.0, weights={"rank killed": 1.0}))
    path.write_text(json.dumps({"name": "rank SIGKILL"}) + "\n")
    with pytest.raises(UsageError, match="no file of a campaign"):
        CampaignFile(path, PLAN)


def test_the_summary_weighs_parts_by_their_time(tmp_path: Path) -> None:
    file = CampaignFile(None, PLAN)
    file.ended(result_of(30.0))
    file.ended(result_of(90.0, wrong="bits differ"))
    found = summary(file.parts())
    assert (found["faults"], found["goodput"], found["ledger_goodput"]) == (4, 0.5, None)
    assert found["wrong"] == ["bits differ"]
    assert found["by_fault"]["rank killed"] == {
        "faults": 4, "recovery_median_s": 0.5, "recovery_max_s": 0.5, "repeated_steps_max": 2,
    }  # fmt: skip
    assert found["lost_per_fault_s"] == pytest.approx((15.0 + 45.0) / 4)
