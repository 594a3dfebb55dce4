"""Under the real launcher: whatever the layout, a killed rank changes no bit of what the ranks compute.

Each rank writes a digest of its parameters, optimizer and generator after each step; an undisturbed run gives the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exact_reentry import Run, compare, spares_wait, undisturbed
from resilio_hpc.launch.agent.last_step import OWN

pytestmark = pytest.mark.slow
STEP_S, MOST_STEPS = 0.03, 200
_undisturbed: dict[str, dict[int, dict[int, str]]] = {}  # by layout


@contextmanager
def trained(path: Path, layout: str, nodes: int, spare: int = 0) -> Iterator[Run]:
    """Yield a run; at the end all that its ranks have computed is what an undisturbed one's have."""
    run = Run(path / "struck", layout, (nodes, spare), STEP_S, 1_000_000)
    try:
        run.until(lambda: reached(run, 8), "some steps")
        yield run
        at = furthest(run) + 3
        run.until(lambda: reached(run, at), "steps after the last fault")
        run.end()
    finally:
        run.stop()
    if layout not in _undisturbed:
        _undisturbed[layout] = undisturbed(path, layout, 1, MOST_STEPS)
    wanted = _undisturbed[layout]
    result = compare(run.stamps(), wanted)
    assert result.wrong == ""
    assert result.compared > 8 * len(wanted)


def furthest(run: Run) -> int:
    return max(found[-1][0] for found in run.stamps().values() if found)


def reached(run: Run, step: int) -> bool:
    """Return whether all ranks of the newest round have done so many steps."""
    found = run.stamps()
    newest = max((number for number, _ in found), default=0)
    done = [stamps[-1][0] if stamps else -1 for (number, _), stamps in found.items() if number == newest]
    return len(done) == run.ranks and min(done) >= step


def kill(run: Run, *ranks: int) -> None:
    """Kill ranks of the newest round at once, and wait until all train again."""
    before, pids = len(run.events("recovered")), {}
    for event in run.events("ranks"):
        pids |= event.fields["pids"]
    for rank in ranks:
        os.kill(pids[str(rank)], signal.SIGKILL)
    run.until(lambda: len(run.events("recovered")) > before, "recovery")
    run.until(run.trains, "training again")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "dp-tp-pp"])
def test_where_a_replica_lives_no_step_is_done_again(tmp_path: Path, layout: str, nodes: int) -> None:
    with trained(tmp_path, layout, nodes) as run:
        if nodes > 1:
            run.until(
                lambda: run.events("committed"), "the first save: the nodes know each other's replicators by then"
            )
        kill(run, 1)
        assert run.done_again() <= 1
        kill(run, run.ranks - 1)
        assert run.done_again() <= 1
        assert run.events("ranks")[-1].fields["kept"] > 0


@pytest.mark.parametrize("layout", ["hsdp", "dp-tp-pp"])
def test_a_standby_process_takes_the_place_of_a_rank_of_any_layout(tmp_path: Path, layout: str) -> None:
    with trained(tmp_path, layout, 1, spare=1) as run:
        run.until(lambda: spares_wait(run, 1), "a standby process")
        kill(run, 2)
        assert run.done_again() <= 1
        assert len(run.events("standby_used")) == 1


def test_two_ranks_of_different_replicas_are_lost_at_once(tmp_path: Path) -> None:
    with trained(tmp_path, "dp-tp-pp", 1) as run:
        kill(run, 0, 3)  # the ranks of a stage are 0 to 3: its replicas are 0 and 2, 1 and 3
        assert run.done_again() <= 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_part_that_no_other_rank_has_is_that_of_the_last_save_and_this_is_said(tmp_path: Path, nodes: int) -> None:
    with trained(tmp_path, "fsdp2", nodes) as run:
        run.until(lambda: run.events("committed") and reached(run, 44), "steps after the first save")
        kill(run, 1)
        assert run.done_again() > 1
        assert run.events("first_step")[-1].fields["restored"] % 40 == 0
        assert OWN in {event.fields["why"] for event in run.events("last_step")}


def test_where_all_replicas_are_lost_the_run_goes_back_to_its_last_save(tmp_path: Path) -> None:
    with trained(tmp_path, "hsdp", 1) as run:
        run.until(lambda: run.events("committed") and reached(run, 44), "steps after the first save")
        kill(run, 0, 2)
        assert run.done_again() > 1
        assert run.events("first_step")[-1].fields["restored"] % 40 == 0
