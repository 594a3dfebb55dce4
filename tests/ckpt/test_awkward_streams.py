"""A standard error that takes nothing, as on a full disk or without a reader: saves and restores go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import sys
from pathlib import Path
from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.core.errors import CheckpointError
directory = Path(sys.argv[1])
directory.write_text("no directory")
checkpoint = Checkpointer(directory)
try:
    checkpoint.save(1, {"x": 1}).wait(timeout_s=60)
except CheckpointError as error:
    print(error)
directory.unlink()
for step in (2, 3):
    checkpoint.save(step, {"x": step}).wait(timeout_s=60)
manifest = directory / "step-0000000003" / "manifest.json"
manifest.write_text("damaged")
print(checkpoint.restore())
"""


@pytest.mark.parametrize("where", [">&3 2>/dev/full", ">&3 2>&-", "2>&1 >&3 | true"])
def test_what_cannot_be_said_costs_nothing(where: str, tmp_path: Path) -> None:
    answer, checkpoints = tmp_path / "answer", tmp_path / "c"
    subprocess.run(
        ["sh", "-c", f'exec 3>"$0"; "$1" -c "$2" "$3" {where}', answer, sys.executable, PROGRAM, checkpoints],
        env=scrubbed(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert answer.read_text().splitlines() == [
        f"step 1 was not saved (committed): File exists: {checkpoints}",
        "(2, {'x': 2})",
    ]
