"""Runs of the examples for frameworks under the real launcher, in the environment that has the frameworks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.waiting import PATIENCE_S, until

PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
STRIKE = str(SUPPORT / "frameworks" / "strike.py")


def need_framework(*modules: str) -> None:
    """Skip where the environment of scripts/frameworks_setup.sh lacks one of them."""
    look = "import importlib.util, sys; sys.exit([m for m in sys.argv[1:] if not importlib.util.find_spec(m)] != [])"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", look, *modules], timeout=PATIENCE_S).returncode:
        pytest.skip(f"no {' and '.join(modules)} here (scripts/frameworks_setup.sh)")


class FrameworkRun:
    """One run in the folder ``path``; each call is a launch of it."""

    def __init__(self, path: Path, ranks: int, words: Sequence[str]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self._words = path, [str(word) for word in words]
        self._launcher = [str(PYTHON), "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run"]
        self._launcher += ["--nproc-per-node", str(ranks)]

    def start(self, *before: str) -> subprocess.Popen[str]:
        """Start a launch; ``before``: words before the script's."""
        return subprocess.Popen(
            [*self._launcher, *before, *self._words], cwd=self.path, text=True, stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE, env=scrubbed(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONWARNINGS="ignore"),
        )  # fmt: skip

    def launch(self, *before: str) -> str:
        """Launch, and return what was printed, after a good end."""
        return self.end_of(self.start(*before))

    def stop_and_go_on(self, step: int) -> str:
        """Have the launcher end on SIGTERM after so many steps, and launch again. Returns what the latter printed."""
        first = self.start(STRIKE, str(step), "0", "wait")
        until((self.path / "struck").exists, "a step is under way", lambda: first.poll())
        first.terminate()
        until(lambda: self.events("stopping"), "the stop is under way", lambda: first.poll())
        (self.path / "go on").touch()
        said, _ = first.communicate(timeout=PATIENCE_S)
        assert not (self.path / "end.json").exists(), said[-3000:]
        return self.launch()

    def end_of(self, launch: subprocess.Popen[str]) -> str:
        """Wait for a launch's good end."""
        said, _ = launch.communicate(timeout=PATIENCE_S)
        assert launch.returncode == 0, said[-3000:]
        return said

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The fields of the ledger's events of one kind."""
        return [event.fields for event in read_ledger(self.path / "run" / "ledger") if event.kind == kind]

    @property
    def end(self) -> dict[str, Any]:
        """What the script wrote at its end."""
        found: dict[str, Any] = json.loads((self.path / "end.json").read_text())
        return found
