"""The plain torchrun script of examples/, what it ends with undisturbed, and where its lives have begun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from resilio_hpc.core import process
from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.frameworks.runs import STRIKE
from tests.support.waiting import PATIENCE_S

SCRIPT = ROOT / "examples" / "train_plain.py"
STEPS, EVERY, STRUCK = 20, 6, 9
COMMAND = [str(SCRIPT), "--steps", str(STEPS), "--every", str(EVERY)]
STRIKE_AT = [STRIKE, str(STRUCK), "1"]


def undisturbed_end(path: Path) -> list[str]:
    """Run it in two ranks, forked with torchrun's environment and without a launcher. Returns what each held then."""
    argv = [sys.executable, str(SUPPORT / "train" / "forked_ranks.py"), json.dumps([[str(path), STRIKE, *COMMAND]])]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process.run(argv, timeout_s=PATIENCE_S, env=scrubbed(**variables), cwd=path)
    return ends(path)


def ends(path: Path) -> list[str]:
    """Return what each rank's optimizer and model held at the end of a run in this folder."""
    return [(path / "end" / rank).read_text() for rank in ("0", "1")]


def begun(said: str) -> list[int]:
    """Return the steps from which its lives have begun, by what rank 0 has printed."""
    return [int(line.rpartition(" ")[2]) for line in said.splitlines() if "ranks, from step" in line]
