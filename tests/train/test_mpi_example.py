"""The MPI example alone, as one process: it needs no torch, goes on from its checkpoint, and is right."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from resilio_hpc.core import process
from tests.support.environments import ROOT, scrubbed
from tests.support.requirements import need_program

EXAMPLE = ROOT / "examples" / "mpi_jacobi.py"
SIZE = 20
# Open MPI refuses root unless told, and looks for other machines unless told not to.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self"}
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__'); print('torch' in sys.modules)"


def digest(steps: int) -> str:
    """The plate after so many steps, in the plainest way."""
    cells = np.zeros((SIZE + 2, SIZE + 2))
    cells[0, 1:-1] = 1.0
    for _ in range(steps):
        old = cells.copy()
        for row in range(1, SIZE + 1):
            for column in range(1, SIZE + 1):
                vertical = old[row - 1, column] + old[row + 1, column]
                cells[row, column] = 0.25 * (vertical + (old[row, column - 1] + old[row, column + 1]))
    return hashlib.sha256(cells[1:-1, 1:-1].tobytes()).hexdigest()


def solve(directory: Path, steps: int) -> str:
    """Returns what was printed last."""
    own = scrubbed(**ENVIRONMENT, RESILIO_CHECKPOINT_DIR=directory / "checkpoints")
    arguments = [f"--size={SIZE}", f"--steps={steps}", "--every=7", f"--result={directory}/result"]
    done = process.run([sys.executable, "-c", RUN, str(EXAMPLE), *arguments], 120.0, env=own)
    return done.stdout.splitlines()[-1]


def test_the_example_goes_on_where_it_ended_and_never_imports_torch(tmp_path: Path) -> None:
    need_program("mpiexec", package="openmpi-bin")
    for steps in (12, 30):
        assert solve(tmp_path, steps) == "False"
        assert json.loads((tmp_path / "result").read_text())["sha256"] == digest(steps)
    assert len(list((tmp_path / "checkpoints").iterdir())) > 1
