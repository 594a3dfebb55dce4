"""``resilio nodes``: what is printed, for people and programs, and what is written. With real Slurm: tests/slurm."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from resilio_hpc.cli.main import main
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.prolog_epilog.base import reports
from resilio_hpc.prolog_epilog.run.health_run import node_name
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["nodes", *argv]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultLedger:
    monkeypatch.setenv("RESILIO_NODE_FAULTS", str(tmp_path / "faults"))
    monkeypatch.setenv("PATH", "/nonexistent")  # no Slurm
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    made = FaultLedger(tmp_path / "faults")
    now = time.time()
    made.append(
        [
            NodeFault(time=now - 60, node="n3", kind="node-lost", run="r1", job="7", evidence="silent for 5 s"),
            NodeFault(time=now - 7 * 86400, node="n4", kind="device-error", device="local rank 2", evidence="ECC"),
        ]
    )
    return made


def test_list_shows_scores_and_for_a_named_node_each_fault(
    capsys: pytest.CaptureFixture[str], ledger: FaultLedger
) -> None:
    text = said(capsys, "list")
    assert text.splitlines() == [
        "n3: score 1.00: node-lost 1; avoided by jobs",
        "n4: score 0.50: device-error 1",
    ] or text.splitlines()[1].startswith("n4: score 0.50")
    text = said(capsys, "list", "n3")
    assert "counts 1.00" in text and "job 7: node-lost: silent for 5 s" in text and "n4" not in text
    whole = json.loads(said(capsys, "list", "--json"))
    assert [one["node"] for one in whole] == ["n3", "n4"]
    assert whole[1]["devices"] == {"local rank 2": pytest.approx(0.5, abs=0.001)}
    assert "no faults are remembered of n9" in said(capsys, "list", "n9")


def test_forget_begins_anew(capsys: pytest.CaptureFixture[str], ledger: FaultLedger) -> None:
    assert "would be added" in said(capsys, "forget", "n3", "--why", "new board", "--dry-run")
    assert "n3" in said(capsys, "list")
    assert "n3: forgotten: new board" in said(capsys, "forget", "n[3-4]", "--why", "new board")
    assert said(capsys, "list") == "no faults are remembered\n"


def test_learn_adds_what_a_run_has_seen_once(
    capsys: pytest.CaptureFixture[str], ledger: FaultLedger, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "one"
    writer = Ledger(run / "ledger", "w")
    writer.append("launch", job="9", mode="batch", nodes=["n5"])
    writer.append("node_lost", node="n5", silent_s=5.0)
    writer.close()
    assert "1 would be added" in said(capsys, "learn", str(run), "--dry-run")
    assert json.loads(said(capsys, "learn", str(run), "--json"))["added"][0]["node"] == "n5"
    assert "0 added" in said(capsys, "learn", str(run))
    assert "there is no run" in said(capsys, "learn", str(tmp_path), code=2)


def test_report_leaves_a_file_for_roots_daemon(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spool, here = tmp_path / "spool", node_name(os.environ)
    reports.prepare(spool)
    assert "would be reported" in said(capsys, "report", here, "--why", "ECC", "--spool", str(spool), "--dry-run")
    assert list(spool.iterdir()) == []
    assert "reported; root's daemon" in said(capsys, "report", here, "--why", "ECC", "--spool", str(spool))
    assert [one.why for one in reports.take(spool, here, time.time()).taken] == ["ECC"]
    assert f"srun --nodelist={here}x" in said(capsys, "report", f"{here}x", "--why", "ECC", code=2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["forget", "ALL", "--why", "x"], "not the name of a node"),
        (["forget", "n3"], "--why"),
        (["list", "n[3"], "not a Slurm host list"),
        (["list", "--policy", "/nonexistent"], "not a policy"),
        (["apply", "--dry-run", "--observe"], "not allowed with"),
        (["learns"], "did you mean learn?"),
        ([], "required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], ledger: FaultLedger, argv: list[str], words: str
) -> None:
    text = said(capsys, *argv, code=2)
    assert words in text and len(text.splitlines()) == 1


def test_without_slurm_there_is_a_line_that_says_so(
    capsys: pytest.CaptureFixture[str], ledger: FaultLedger, tmp_path: Path
) -> None:
    for argv in (["exclude"], ["apply", "--dry-run", "--ledger", str(tmp_path / "faults")]):
        text = said(capsys, *argv, code=1)
        assert (text.startswith("resilio: error: sinfo") and len(text.splitlines()) == 1) or "cannot start" in text


def test_where_memory_is_off_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RESILIO_NODE_FAULTS", "off")
    assert "nothing is remembered" in said(capsys, "list", code=2)
    assert "no faults are remembered" in said(capsys, "list", "--ledger", str(tmp_path / "empty"))
