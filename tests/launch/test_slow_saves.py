"""When a checkpoint takes too long, and when saves go on again."""

from __future__ import annotations

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.launch.controller.checkpoints.slow_saves import LEAST_S, SlowSaves
from resilio_hpc.launch.protocol import messages as m

RECORD = ShardRecord(0, "node-0.h5", 1, "own", ())


def begun(saves: SlowSaves, step: int, now: float, round_number: int = 0) -> None:
    for node in ("n1", "n2"):
        saves.ordered(node, m.PersistStep(1, round_number, step), now)


def persisted(saves: SlowSaves, node: str, step: int, now: float) -> None:
    assert saves.answered(m.StepPersisted(node, 1, 0, step, RECORD), now) is None


def committed(saves: SlowSaves, step: int, now: float) -> object:
    return saves.answered(m.ManifestWritten("n1", 1, 0, step, 0.1), now)


def test_who_is_still_at_it_is_told_once_and_when_saves_go_on() -> None:
    saves = SlowSaves()
    assert saves.overdue(1e9) is None
    begun(saves, 5, 100.0)
    persisted(saves, "n1", 5, 101.0)
    assert saves.overdue(100.0 + LEAST_S - 1) is None
    assert saves.overdue(170.0) == {"step": 5, "waited_s": 70.0, "nodes": ["n2"]}
    assert saves.overdue(500.0) is None
    assert saves.answered(m.PersistFailed("n2", 1, 0, 5, "I/O error"), 550.0) is None
    begun(saves, 9, 551.0)
    assert saves.overdue(900.0) is None  # no save has come to an end yet
    assert committed(saves, 9, 900.0) == {"step": 9, "waited_s": 800.0}
    assert committed(saves, 10, 901.0) is None


def test_a_commit_that_hangs_is_told_too() -> None:
    saves = SlowSaves()
    begun(saves, 5, 0.0)
    for node in ("n1", "n2"):
        persisted(saves, node, 5, 1.0)
    saves.ordered("n1", m.CommitStep(1, 0, 5, 2, (RECORD,)), 1.0)
    assert saves.overdue(80.0) == {"step": 5, "waited_s": 80.0, "nodes": ["n1"]}


def test_what_always_takes_long_is_not_told_again() -> None:
    saves = SlowSaves()
    begun(saves, 5, 0.0)
    assert saves.overdue(60.0) is not None
    assert committed(saves, 5, 100.0) is not None
    begun(saves, 6, 100.0)
    assert saves.overdue(399.0) is None
    assert saves.overdue(400.0) is not None


def test_what_a_round_left_behind_is_forgotten() -> None:
    saves = SlowSaves()
    begun(saves, 5, 0.0)
    saves.abandoned(0)
    assert saves.overdue(60.0) is not None
    saves = SlowSaves()
    begun(saves, 5, 0.0)
    saves.abandoned(1)
    assert saves.overdue(60.0) is None
    begun(saves, 5, 60.0, round_number=1)
    assert saves.overdue(119.0) is None


def test_an_order_that_is_said_again_is_no_new_save() -> None:
    saves = SlowSaves()
    begun(saves, 5, 0.0)
    begun(saves, 5, 59.0)
    assert saves.overdue(60.0) is not None
