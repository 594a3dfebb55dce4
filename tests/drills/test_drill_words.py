"""The list of drills: every one has a name, words, and a place; those for live runs hurt nothing but the run."""

from __future__ import annotations

import json

import pytest

from resilio_hpc.cli.main import main
from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.drill_words import DEV_CLUSTER, LIVE_ACTS, LIVE_RUN, act_words, drill_of, listed, slug
from resilio_hpc.drills.table import DRILLS
from resilio_hpc.launch.controller.faults.drill_orders import BLOWS


def test_every_drill_has_a_name_of_its_own_and_says_what_it_does_and_what_should_happen() -> None:
    words = listed()
    assert len({one.name for one in words}) == len(DRILLS)
    for one in words:
        assert one.does and one.should and one.name == slug(one.title), one
        assert "{}" not in one.does and "_" not in one.does, one


def test_each_act_of_a_drill_has_words() -> None:
    unknown = {act.do for drill in DRILLS for act in drill.acts if act_words(act) == act.do and "_" in act.do}
    assert unknown == set()


def test_only_signals_for_the_runs_own_processes_are_for_live_runs() -> None:
    live = [one for one in listed() if LIVE_RUN in one.where]
    assert {one.name for one in live} == {
        "rank-sigkill", "rank-sigabrt", "rank-sigstop", "agent-sigkill", "controllers-agent-sigkill",
    }  # fmt: skip
    assert all(DEV_CLUSTER in one.where for one in listed())
    assert set(LIVE_ACTS) <= set(BLOWS)


def test_a_drill_is_found_by_its_name_or_its_title() -> None:
    assert drill_of("controllers-agent-sigkill") is drill_of("controller's agent SIGKILL")
    assert drill_of("srun-rank-sigkill").srun and not drill_of("rank-sigkill").srun
    with pytest.raises(UsageError, match="did you mean rank-sigkill"):
        drill_of("rank-sigkil")


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "list"]) == 0
    shown = capsys.readouterr().out
    assert "node-power-cut-with-a-spare" in shown and "srun-rank-sigkill" not in shown
    assert main(["drill", "list", "--where", "live"]) == 0
    assert "node-power-cut" not in capsys.readouterr().out
    assert main(["drill", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in found["drills"]} >= {"rank-sigkill", "srun-rank-sigkill"}
    assert {one["name"] for one in found["campaign_faults"]} >= {"rank killed", "node loses power"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "name at least one drill"),
        (["run", "no-such-drill"], "no drill"),
        (["run", "rank-sigkill", "--campaign"], "leave names"),
        (["run", "rank-sigkill", "--run", "x", "--repeats", "2"], "--repeats"),
        (["run", "--campaign", "--mtbf", "soon"], "a time such as"),
        (["run", "--campaign", "--mtbf", "0"], "more than 0"),
        (["run", "--campaign", "--faults", "fire=1"], "no fault 'fire'"),
        (["run", "--campaign", "--faults", "rank-killed=0"], "no fault is left"),
        (["run", "rank-sigkill", "--run", "/nonexistent"], "no run directory"),
        (["schedule", "rank-sigkill", "--at", "25:00"], "a time of day"),
        (["schedule", "rank-sigkill", "--day", "31"], "from 1 to 28"),
        (["schedule", "rank-sigkill", "--scrontab"], "give --run"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1
