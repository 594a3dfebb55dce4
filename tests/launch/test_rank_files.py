"""The files of a node's ranks: those of ended rounds do not add up on the node's disk."""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_files import RankFiles

MEMBER = m.Member("n1", 0, "n1", 2, 0)


def test_only_the_last_two_rounds_have_error_files(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "logs", tmp_path / "errors")
    for number in range(5):
        local = LocalRound("n1", m.RoundState(1, number, m.world_of((MEMBER,)), 0, 0, ()), MEMBER, None)
        files.begin(local, lambda directory, rank: (directory / f"{rank}.log", directory / f"{rank}.err"))
        files.errors[0].write_text("{}")
    assert sorted(path.name for path in (tmp_path / "errors").iterdir()) == ["3", "4"]
