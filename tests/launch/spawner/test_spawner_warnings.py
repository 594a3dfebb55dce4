"""Slurm may give the warning of ``sbatch --signal`` to every process of a step, not to the agent alone."""

from __future__ import annotations

import os
import signal

import pytest


@pytest.mark.parametrize("warning", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_kills_neither_spawner_nor_ranks(either, warning: signal.Signals) -> None:
    either.spawn(
        """
        import pathlib, time
        print("up", flush=True)
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
        """
    )
    either.until(either.directory / "0.out", "up")
    for pid in (either.spawner.pid, either.pid()):
        os.kill(pid, warning)
    (either.directory / "go").touch()
    assert either.wait_exit().exit_code == 0
    assert either.spawner.pid is not None
