"""What a launch says is written at once; where standard error hangs, nobody waits for it."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from resilio_hpc.launch.process.stderr_writer import PatientStream
from tests.support.waiting import PATIENCE_S


def test_lines_are_written_when_the_call_returns(capsys: pytest.CaptureFixture[str]) -> None:
    stream = PatientStream(patience_s=30.0)
    for number in range(3):
        stream.write(f"{number}\n")
    assert capsys.readouterr().err == "0\n1\n2\n"


def test_while_it_hangs_nobody_waits_and_afterwards_the_lines_come(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", buffering=1) as pipe, os.fdopen(read, "rb") as reader:
        monkeypatch.setattr(sys, "stderr", pipe)
        stream = PatientStream(patience_s=1.0)  # 64 KiB fit into a pipe, and each line beyond them could wait so long
        lines = [f"{number} {'x' * 1000}\n" for number in range(500)]
        writer = threading.Thread(target=lambda: list(map(stream.write, lines)), daemon=True)
        writer.start()
        writer.join(PATIENCE_S)
        assert not writer.is_alive()
        assert not stream.flush(0.01)
        numbers = [int(reader.readline().split()[0]) for _ in range(500)]
        assert numbers == list(range(500))
        assert stream.flush(30.0)
