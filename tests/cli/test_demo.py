"""The demo from end to end: the main job survives, and ends with the same bits as an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.cli.main import main
from resilio_hpc.devtools.demo.stage import why_no_slurm


def play(out: Path, *options: str) -> dict[str, object]:
    assert main(["demo", "--quick", "--out", str(out), *options]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["identical"] is True
    assert summary["undisturbed"]["hash"] == summary["disturbed"]["hash"]
    assert summary["links"] >= 2
    assert all(fault["recovered"] for fault in summary["faults"])
    assert 0.0 < summary["goodput"] <= 1.0
    return dict(summary)


@pytest.mark.slow
@pytest.mark.slurm
def test_on_a_slurm_cluster_of_its_own(tmp_path: Path) -> None:
    if reason := why_no_slurm():
        pytest.skip(reason)
    summary = play(tmp_path)
    kinds = {fault["kind"] for fault in summary["faults"]}  # type: ignore[attr-defined]
    assert kinds == {"rank_killed", "agent_lost", "controller_lost", "node_lost", "time_limit"}


@pytest.mark.slow
def test_on_localhost_where_there_is_no_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = play(tmp_path, "--local")
    assert summary["slurm_version"] == ""
    assert capsys.readouterr().out.count("No Slurm here") == 1
