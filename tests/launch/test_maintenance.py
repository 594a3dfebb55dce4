"""A job of a chain ends before the maintenance of its nodes."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.launch.allocation.job_watch import JobView
from resilio_hpc.launch.chain.maintenance import LOOK_S, EndBeforeMaintenance
from resilio_hpc.slurm.client.reservations import Reservation

FIX = Reservation("fix", 10_000.0, 20_000.0, ("n1",), maintenance=True)


@pytest.mark.parametrize(
    ("end", "nodes", "wanted"),
    [(30_000.0, ("n1", "n2"), 10_000.0), (None, ("n1",), 10_000.0), (9000.0, ("n1",), 9000.0), (None, ("n2",), None)],
)
def test_its_end_is_whichever_comes_first(end: float | None, nodes: tuple[str, ...], wanted: float | None) -> None:
    asked = EndBeforeMaintenance("", lambda job: JobView(nodes, end), lambda: (FIX,), lambda: 0.0)
    assert asked("7") == JobView(nodes, wanted)


def test_slurm_is_seldom_asked_and_its_silence_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    now, looks = [0.0], []

    def look() -> tuple[Reservation, ...]:
        looks.append(now[0])
        if len(looks) > 1:
            raise SlurmError("away")
        return (FIX,)

    asked = EndBeforeMaintenance("", lambda job: JobView(("n1",), None), look, lambda: now[0])
    for now[0] in (0.0, 60.0, LOOK_S, LOOK_S + 60.0):
        assert asked("7") == JobView(("n1",), 10_000.0)
    assert looks == [0.0, LOOK_S]
    assert capfd.readouterr().err.count("it stops before that") == 1
    now[0] = 10_001.0  # nobody took the nodes: the job goes on
    assert asked("7") == JobView(("n1",), None)


def test_no_answer_is_no_answer() -> None:
    assert EndBeforeMaintenance("", lambda job: None, lambda: (FIX,), lambda: 0.0)("7") is None
