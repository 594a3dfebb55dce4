"""Under the real launcher: ranks that live enter the next round in their processes, and only the others start again."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.launch.agent.kept_ranks import LEAVE_S
from tests.support.launch.reentry_runs import STEPS, STRUCK, ReentryOutcome


@pytest.mark.parametrize(
    "where",
    [
        "killed",
        pytest.param("killed, state outside", marks=pytest.mark.slow),
        pytest.param("in the optimizer", marks=pytest.mark.slow),
        pytest.param("in the optimizer, state outside", marks=pytest.mark.slow),
        pytest.param("asleep", marks=pytest.mark.slow),
        pytest.param("stopped", marks=pytest.mark.slow),
        pytest.param("device", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_lives_goes_on_in_its_process(tmp_path: Path, where: str) -> None:
    done = ReentryOutcome(tmp_path, where)
    done.check()
    processes = done.processes()
    assert len(processes[0]) == 2 and len(set(processes[0])) == 1, "it entered twice in one process"
    assert len(set(processes[1])) == 2
    assert [line[2] for line in done.said("ENTERS")][2:] == [str(STRUCK + ("optimizer" in where))] * 2
    (left,) = done.events("ranks_left")
    assert (left["kept"], left["of"], left["others"]) == (1, 2, [1] if where == "stopped" else [])
    assert [event["kept"] for event in done.events("ranks")] == [0, 1]


def test_a_standby_process_takes_the_place_of_the_rank_that_is_killed(tmp_path: Path) -> None:
    done = ReentryOutcome(tmp_path, "killed, state outside, standby waits", "--spare-ranks", "1")
    done.check()
    (used,) = done.events("standby_used")
    assert used["rank"] == 1
    assert done.processes()[1][1] == str(used["pid"])
    assert used["pid"] == done.events("standby_ready")[0]["pid"]
    assert done.said("BORN") and {rank for rank, _ in done.said("BORN")} == {"0", "1"}, "no rank was started again"
    assert [event["kept"] for event in done.events("ranks")] == [0, 2]


@pytest.mark.slow
def test_a_script_that_needs_its_rank_too_early_runs_without_standby_processes(tmp_path: Path) -> None:
    done = ReentryOutcome(tmp_path, "killed, state outside", "--spare-ranks", "2")
    done.check()
    lost = done.events("standby_lost")
    assert lost and all(event["for_good"] for event in lost)
    assert "run.rank: a process of --spare-ranks has no rank before" in lost[0]["reason"]
    assert done.events("standby_used") == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["raises", "raises, state outside"])
def test_a_rank_that_raises_enters_again_as_well(tmp_path: Path, where: str) -> None:
    done = ReentryOutcome(tmp_path, where)
    done.check()
    assert all(len(found) == 2 and len(set(found)) == 1 for found in done.processes().values())
    assert len(done.said("BORN")) == 2


@pytest.mark.slow
def test_ranks_that_report_steps_enter_again_under_the_policy_failed_too(tmp_path: Path) -> None:
    done = ReentryOutcome(tmp_path, "killed", "--restart-policy", "failed")
    done.check()
    assert len(set(done.processes()[0])) == 1
    assert len(done.events("restarts_all")) == 1


@pytest.mark.slow
def test_a_failure_while_ranks_recover_costs_no_more(tmp_path: Path) -> None:
    done = ReentryOutcome(tmp_path, "killed, and while it recovers")
    done.check()
    assert len(done.said("BORN")) == 4
    assert [event["kept"] for event in done.events("ranks")] == [0, 1, 1]


@pytest.mark.slow
def test_a_rank_that_does_not_leave_is_ended_and_started_again(tmp_path: Path) -> None:
    done = ReentryOutcome(tmp_path, "deaf")
    done.check()
    assert done.said("DEAF")
    assert all(len(set(found)) == 2 for found in done.processes().values())
    (left,) = done.events("ranks_left")
    assert (left["kept"], left["others"]) == (0, [0])


@pytest.mark.slow
def test_a_rank_that_a_broken_connection_does_not_wake_ends_and_starts_again(tmp_path: Path) -> None:
    """As it was seen of gloo, seldom: a collective whose connections are all shut down does not end."""
    found = ReentryOutcome(tmp_path, "raises, not woken")
    assert sorted(rank for rank, _ in found.said("BORN")) == ["0", "0", "1"]
    (left,) = found.events("ranks_left")
    assert (left["kept"], left["of"]) == (1, 2)
    assert left["seconds"] < LEAVE_S  # the agent would have ended it then
    assert [int(words[0]) for words in found.said("STEP")] == list(range(STEPS))


@pytest.mark.slow
def test_by_the_policy_all_ranks_start_again(tmp_path: Path) -> None:
    done = ReentryOutcome(tmp_path, "killed", "--restart-policy", "all")
    done.check()
    assert done.events("ranks_left") == []
    assert all(len(set(found)) == 2 for found in done.processes().values())
