"""A data loader's worker is killed, as the kernel does without memory: the rank says so, whatever it met first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.rank_error import end_of
from resilio_hpc.launch.workers.forking import rank_main
from resilio_hpc.launch.workers.output.error_file import read_error
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

LOADER = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        if number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(3) * number

for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):
    time.sleep(0.01)
"""
HANDLER = """
import os, signal, time

def handler(*_):
    raise RuntimeError("a child has ended")

class Slow(ValueError):
    def __str__(self):
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        time.sleep(0.1)
        return "its own"

signal.signal(signal.SIGCHLD, handler)
raise Slow
"""


def reported(folder: Path, program: str) -> tuple[str, str]:
    """Message and traceback of a rank's error file after a program's end."""
    script, error = folder / "train.py", folder / "0.json"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-u", rank_main.__file__, "script", str(script)],
        env=scrubbed(TORCHELASTIC_ERROR_FILE=error), timeout=PATIENCE_S, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found, note = read_error(error)
    assert found is not None, f"{note}\n{done.stderr}"
    assert "Traceback (most recent call last):" in done.stderr
    assert "rank_main.py" not in done.stderr
    return found.message, found.traceback


def test_the_worker_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    message, traceback = reported(tmp_path, LOADER)
    assert message.startswith("RuntimeError: DataLoader worker (pid")
    assert "train.py" in traceback


def test_an_error_is_recorded_though_the_programs_handler_would_raise_in_its_report(tmp_path: Path) -> None:
    message, _ = reported(tmp_path, HANDLER)
    assert message == "Slow: its own"


def test_the_handler_is_given_back() -> None:
    error = ValueError("shard 1 is empty")

    def handler(*_: object) -> None:
        raise RuntimeError("a child has ended")

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert end_of(error) == (error, handler)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert end_of(error) == (error, None)
    finally:
        signal.signal(signal.SIGCHLD, before)
