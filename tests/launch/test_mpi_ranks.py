"""What an agent tells of ranks that end with their MPI step: the failure itself at once, its echoes only alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.workers.forking.spawner_messages import Exited, SpawnerEvent
from resilio_hpc.launch.workers.mpi.ranks import KILLED_WITH_STEP, MpiRanks
from resilio_hpc.launch.workers.mpi.tasks import STEP_KILLED
from resilio_hpc.launch.workers.rank_owner import StopHow


class FakeSpawner:
    """Says what the test wants said; anything else is an AttributeError."""

    def __init__(self) -> None:
        self.said: list[SpawnerEvent] = []

    def events(self) -> list[SpawnerEvent]:
        events, self.said = self.said, []
        return events

    def stop(self, signal: int, grace_s: float, keep_stores_from: int | None, **_how: bool) -> None:
        pass

    def kill(self) -> None:
        pass


class Core:
    """The core as far as ends of ranks go."""

    slots = 2
    local = None  # no round
    ending = None

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def rank_said(self, *_arguments: Any) -> None:
        raise AssertionError("no rank runs here")

    @property
    def ends(self) -> Core:
        return self

    def exited(self, local: Any, local_rank: int, how: Any, at: float, error: Any, evidence: Any = None) -> None:
        self.told.append((local_rank, error[0]))


NEVER_S, AT_ONCE_S = 1e6, 0.0
Make = Callable[[float], MpiRanks]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Those of one node, whose echoes wait for so long."""
    monkeypatch.setattr(MpiRanks, "_new_spawner", lambda *_: FakeSpawner())
    options = LaunchOptions("solver.py", "script", str(tmp_path), mpi="pmix", nproc_per_node="2")
    node: Any = SimpleNamespace(options=options, local_dir=tmp_path, arena_dir=tmp_path)
    core: Any = Core()
    devices: Any = None  # not asked
    made: list[MpiRanks] = []

    def make(echo_s: float) -> MpiRanks:
        made.append(MpiRanks(node, core, devices, tmp_path, "token", tmp_path, echo_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def exited(local_rank: int, code: int) -> Exited:
    return Exited(local_rank, 100 + local_rank, code, None, 1.0, "mpi")


def ended(ranks: MpiRanks, local_rank: int, code: int) -> list[tuple[int, str]]:
    """What the core has been told after a rank's end and a turn of the agent's loop."""
    ranks._spawner.said.append(exited(local_rank, code))
    ranks.tick()
    core: Any = ranks._core
    told: list[tuple[int, str]] = core.told
    return told


def test_an_echo_waits_and_a_failure_does_not(ranks: Make) -> None:
    made = ranks(NEVER_S)
    assert ended(made, 0, STEP_KILLED) == []
    assert ended(made, 1, 3) == [(1, "failed, exit code 3")]


def test_a_stop_makes_echoes_pointless(ranks: Make) -> None:
    made = ranks(AT_ONCE_S)
    made._on_exited(exited(0, STEP_KILLED))  # the loop has not come to it yet
    made.stop(StopHow(), 0)
    assert ended(made, 1, 3) == [(1, "failed, exit code 3")]


def test_an_echo_that_nothing_explains_is_told_in_the_end(ranks: Make) -> None:
    assert ended(ranks(AT_ONCE_S), 0, STEP_KILLED) == [(0, KILLED_WITH_STEP)]


def test_an_abort_is_no_echo(ranks: Make, tmp_path: Path) -> None:
    made = ranks(NEVER_S)
    (tmp_path / "0.log").write_text(
        "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 5.\n"
    )
    made._files.error_logs[0] = tmp_path / "0.log"
    assert ended(made, 0, STEP_KILLED) == [(0, "called MPI_Abort with error code 5")]
