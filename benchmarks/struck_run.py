"""A run of the launcher whose ranks are struck: what its ledger and its processes tell."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from resilio_hpc.core.ledger import Event, read_ledger

LIMIT_S = 120.0


class StruckRun:
    """It runs in a directory of its own, on so many nodes, all of them this machine."""

    def __init__(self, path: Path, argv: Sequence[str], nodes: int) -> None:
        """Begin it. ``argv``: the launcher's options, and the script's."""
        self.path = path
        self.ledger = path / "run" / "ledger"
        path.mkdir()
        launcher = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch")
        environment = {**os.environ, "RESILIO_LOCAL_NODES": str(nodes), "OMP_NUM_THREADS": "1"}
        with (path / "log").open("wb") as log:
            self.process = subprocess.Popen(
                (*launcher, "--run-dir", "run", "--no-environment-check", *argv),
                cwd=path, env=environment, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_ledger(self.ledger) if event.kind == kind] if self.ledger.is_dir() else []

    def until(self, reached: Callable[[], object], what: str) -> None:
        """Wait for it. Raises RuntimeError, with the launcher's output, where it does not come."""
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            is_over = self.process.poll() is not None
            if (time.monotonic() > deadline or is_over) and not reached():
                raise RuntimeError(f"{what}: {(self.path / 'log').read_text()[-2000:]}")
            time.sleep(0.01)

    def pids_by_rank(self) -> dict[int, int]:
        """Return the ranks of the newest round."""
        found = self.events("ranks")
        newest = max((event.fields["round"] for event in found), default=-1)
        pids = [one.fields["pids"] for one in found if one.fields["round"] == newest]
        return {int(rank): int(pid) for one in pids for rank, pid in one.items()}

    def pids(self) -> list[int]:
        """Return their processes."""
        return list(self.pids_by_rank().values())

    def trains(self) -> bool:
        """Return whether all ranks of the newest round have done a step."""
        newest = [self.events(kind)[-1].fields["round"] for kind in ("start", "first_step")]
        return newest[0] == newest[1]

    def stop(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(LIMIT_S)
