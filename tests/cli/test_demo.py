"""The demo from end to end: the main job survives, and ends with the same bits as an undisturbed run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from resilio_hpc.cli.demo import ViewPicture
from resilio_hpc.cli.main import main
from resilio_hpc.core.ledger import Ledger
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


def recovered_run(path: Path) -> Path:
    """A run that trains again after a fault, as the product's ledger has it."""
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": "abc", "created": time.time() - 60}))
    status = {"time": time.time(), "epoch": 1, "controller": "n1", "phase": "running", "round": 1, "committed": 40}
    (path / "status.json").write_text(json.dumps(status))
    ledger = Ledger(path / "ledger", "1-n1-agent")
    ledger.append("rank_failed", node="n1", rank=3, signal=9, kind="signal", round=0)
    ledger.append("recovered", kind="rank_killed", node="n1", rank=3, recovery_s=0.5, lost_steps=2)
    return path


def test_the_views_picture_tells_fault_and_recovery_apart(tmp_path: Path) -> None:
    run = recovered_run(tmp_path / "run")
    picture = ViewPicture(tmp_path / "view.svg")
    picture.look(run)
    drawn = (tmp_path / "view.svg").read_text()
    colours = dict(re.findall(r"\.terminal-(r\d+) \{ fill: (#[0-9a-f]+)", drawn))
    of = {words: kind for kind, words in re.findall(r'class="terminal-(r\d+)"[^>]*>([^<]*)', drawn)}
    red, green = (int(colours[of[words]][1:], 16) for words in ("killed&#160;rank", "0.50&#160;s"))
    assert red >> 16 > (red >> 8) & 255 and green >> 16 < (green >> 8) & 255
    assert "@font-face" not in drawn and "http" not in drawn.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )
    width = float(re.search(r'viewBox="0 0 (\d+)', drawn)[1])  # type: ignore[index]
    assert 20 * 830 / width >= 12, "letters of 20 units are readable in a page of 830 pixels"

    (tmp_path / "view.svg").unlink()
    picture.look(run)
    assert not (tmp_path / "view.svg").exists(), "there is nothing new"


def test_a_picture_needs_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--view-picture", str(tmp_path / "nowhere" / "view.svg")]) == 2
    assert "--view-picture" in capsys.readouterr().err


@pytest.mark.slow
def test_on_localhost_where_there_is_no_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = play(tmp_path, "--local")
    assert summary["slurm_version"] == ""
    assert capsys.readouterr().out.count("No Slurm here") == 1
