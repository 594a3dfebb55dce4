"""Studies: published figures, the user's own runs, the same seed twice, sizes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.report.chain.run_report import RunReport, read_report
from resilio_hpc.simulate import plan_study
from resilio_hpc.simulate.constants import SourceKind, defaults
from resilio_hpc.simulate.fault_trace import Domain, fault_trace
from resilio_hpc.simulate.fleets import fleet_named, fleets
from resilio_hpc.simulate.plan_study import StudyRequest
from resilio_hpc.simulate.save_times import SaveTimes
from resilio_hpc.simulate.study import Study
from resilio_hpc.simulate.study_json import study_json
from resilio_hpc.simulate.study_page import study_page
from resilio_hpc.simulate.study_text import ettr, study_lines, work
from tests.support.report.long_runs import LongRun, write_run


def studied(*reports: RunReport, **asked: Any) -> Study:
    return plan_study.run(StudyRequest(**{"repeats": 2, **asked}), reports)


def ettr_of(**asked: Any) -> float:
    return studied(**asked).rows[0].middle(ettr)


# -- published figures -------------------------------------------------------------------------------------------------


def test_the_faults_of_llama_3_are_as_many_as_published() -> None:
    fleet, constants = fleet_named("llama3"), defaults()
    counts = [len(fault_trace(fleet, constants, 2048, 8, 0, 54 * 86_400, seed)) for seed in range(20)]
    assert 419 * 0.95 < sum(counts) / 20 < 419 * 1.05
    assert sum(fleet.faults.values()) == 419


def test_one_in_fourteen_days_a_thousand_gpus_of_ant_do_not_fail() -> None:
    """Published: 93 % of jobs of 1,000 GPUs fail within a day."""
    fleet, constants = fleet_named("ant"), defaults()
    failed = sum(bool(fault_trace(fleet, constants, 125, 8, 0, 86_400, seed)) for seed in range(400))
    assert 0.89 < failed / 400 < 0.97


@pytest.mark.parametrize("gpus", [2048, 4096, 8192])
def test_metas_own_estimate_is_reproduced(gpus: int) -> None:
    """1 - N r (u0 + dt / 2) of arXiv 2410.21680, with an hour between saves and 5 min to be back."""
    given = {"program_start_s": 0.0, "communicators_s_per_gpu": 0.0, "gb_per_gpu": 0.0}
    found = ettr_of(fleet="rsc1", gpus=gpus, job_s=None, policies=("shared-fs",), given=given, repeats=6)
    assert found == pytest.approx(1 - gpus / 8 * 6.5e-3 / 86_400 * (300 + 1800), abs=0.03)


def test_fewer_losses_give_more() -> None:
    rare, often = (ettr_of(fleet="llama3", days=5.0, save_every_s=every, partner_copies=True, evict_devices=True,
                           policies=("resilio",)) for every in (3600.0, 60.0))  # fmt: skip
    assert often > rare + 0.02


# -- own runs ----------------------------------------------------------------------------------------------------------


def test_a_run_is_predicted_from_its_own_ledger(tmp_path: Path) -> None:
    run = LongRun(4, days=6.0, faults=60, job_hours=48.0)
    report = read_report(write_run(tmp_path / "run", run), 2e9)
    found = studied(report, days=6.0, repeats=9, job_s=48 * 3600.0, policies=("resilio",), spares=2, max_restarts=99)
    assert found.rows[0].middle(ettr) == pytest.approx(report.time.ettr or 0.0, abs=0.02)
    kinds = {one.name: one.kind for one in found.numbers}
    assert kinds["program_start_s"] is SourceKind.MEASURED and kinds["gb_per_gpu"] is SourceKind.GUESS
    assert "own run" in found.fleet.source


def test_too_few_faults_are_no_rate(tmp_path: Path) -> None:
    report = read_report(write_run(tmp_path / "run", LongRun(2, days=1.0, faults=0)), 2e9)
    with pytest.raises(UsageError, match="3 faults are needed"):
        studied(report)
    assert studied(report, mtbf_h=5.0, fleet=None, gpus=2, gpus_per_node=1).fleet.name == "given"


# -- texts -------------------------------------------------------------------------------------------------------------


def test_the_same_seed_says_the_same_and_another_one_does_not() -> None:
    asked: dict[str, Any] = {"gpus": 1024, "mtbf_h": 9.0, "days": 10.0, "domains": ((4, 500.0),)}
    first, again, other = (study_json(studied(**asked, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    for row in json.loads(first)["rows"]:
        for one in row["repeats"]:
            assert sum(one["by_cause_us"].values()) == one["wall_us"] == 864_000_000_000


def test_all_texts_name_the_guesses_and_fit_the_terminal() -> None:
    found = studied(gpus=1024, mtbf_h=9.0, days=10.0, varied=(("spares", "spares", (0, 2)),), given={"queue_s": 5.0})
    lines = study_lines(found, 80)
    assert max(map(len, lines)) <= 80
    text, page = "\n".join(lines), study_page(found)
    for one in found.guesses:
        assert f"{one.name} = " in text
    assert "queue_s" not in text and "given     queue_s = 5 s" in "\n".join(study_lines(found, 80, constants=True))
    assert {"queue_s", "by_hand_s"} <= set(re.findall(r"<th scope=row>(\w+)</th>", page))
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "stopped with no_progress" in text and "unknown" in text


def test_a_number_has_its_source_and_a_name() -> None:
    for one in defaults().names():
        assert re.fullmatch(r"[a-z_]+", one)
    for fleet in fleets().values():
        assert fleet.source and fleet.mix_source and math.isfinite(fleet.per_gpu_day)
    with pytest.raises(UsageError, match="no constant is named"):
        studied(given={"speed": 1.0})
    with pytest.raises(UsageError, match="lasting_share"):
        studied(given={"lasting_share": 2.0})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": 17}, "no whole number of nodes"), ({"fleet": "x"}, "no fleet"), ({"policies": ("x",)}, "no policy"),
        ({"gpus": 8, "min_nodes": 2}, "--min-nodes"), ({"mtbf_h": 1.0, "fleet": "ant"}, "give one of them"),
        ({"gpus": 200_000, "days": 3650.0, "mtbf_h": 0.01}, "faults are to be expected"), ({"job_s": 1.0}, "minute"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_said(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        studied(**asked)


# -- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("takes", "every"), [(0, 10), (3, 10), (10, 10), (11, 10), (35, 10), (7, 1)])
def test_saves_by_formula_are_those_by_hand(takes: int, every: int) -> None:
    saves = SaveTimes(every, 2, takes, takes)
    cycle, free_at, done = every + 2, 0, [0]
    for at in range(1, 400):
        if at >= max(cycle, free_at) and (takes > cycle or at % cycle == 0):
            done.append(at // cycle)
            free_at = at + takes
        finished = [
            number for number, begun in zip(done[1:], _begins(cycle, takes), strict=False) if begun + takes <= at
        ]
        assert saves.durable(at) == saves.copied(at) == (finished[-1] if finished else 0)
        assert saves.snapshots(at) == at // cycle
        following = saves.next_durable_us(at)
        assert following > at and saves.durable(following) >= saves.durable(at)


def _begins(cycle: int, takes: int) -> list[int]:
    return [cycle + number * max(cycle, takes) for number in range(400)]


def test_domains_take_all_their_nodes() -> None:
    fleet = fleet_named("llama3")
    found = fault_trace(fleet, defaults(), 40, 8, 0, 86_400.0, 1, (Domain(16, 3600.0),))
    together = {fault.places for fault in found if len(fault.places) > 1}
    assert together == {tuple(range(16)), tuple(range(16, 32)), tuple(range(32, 40))}


def test_a_large_run_is_accounted_for() -> None:
    found = studied(gpus=100_000, days=1.0, repeats=1, partner_copies=True, evict_devices=True, max_restarts=50,
                    save_every_s=60.0)  # fmt: skip
    assert all(sum(one.by_cause.values()) == 86_400_000_000 for row in found.rows for one in row.results)
    assert found.rows[0].middle(work) > 0.5 and found.rows[0].share(TimeCause.RECOVER) > 0.05
