"""A run that the version before the rooms began (a sample, as that version left it) goes on under this one.

``run-before-rooms.tar.xz``: two nodes of one rank each; rank 1 was killed at step 4, SIGTERM ended it at step 13 of
30. The script checks what it restores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

SAMPLE = Path(__file__).parent / "samples" / "run-before-rooms.tar.xz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.unpack_archive(SAMPLE, tmp_path)
    return tmp_path


def command(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=scrubbed(RESILIO_LOCAL_NODES="2"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_older_versions_run_is_shown(folder: Path) -> None:
    said = command(folder, "resilio_hpc.cli.main", "status", "run")
    for words in ("terminated", "step 13 committed", "killed rank", "rank 1 on local1"):
        assert words in said
    said = command(folder, "resilio_hpc.cli.main", "ledger", "run")
    assert "recovered from a killed rank in 0.45 s" in said


def test_an_older_versions_run_goes_on(folder: Path) -> None:
    before = read_ledger(folder / "run" / "ledger")
    launch = ("resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--nproc-per-node", "1", "--no-torch", "train.py")
    command(folder, *launch)
    new = read_ledger(folder / "run" / "ledger")[len(before) :]
    first = next(event for event in new if event.kind == "first_step")
    assert (first.fields["round"], first.fields["restored"], first.fields["source"]) == (2, 13, "committed")
    verdict = next(event for event in new if event.kind == "verdict")
    assert verdict.fields["verdict"] == "completed"
    assert [event for event in new if event.kind == "committed"][-1].fields["step"] >= 28
