"""Which segments of shared memory are removed after a rank: those that no process holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from resilio_hpc.launch.process.shared_memory import remove

HOLDER = """
import os, sys
os.dup2(os.open(sys.argv[1], os.O_RDONLY), 900)
print("holds", flush=True)
while True:
    for fd in [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]:
        os.close(fd)
"""


def test_a_segment_stays_while_a_process_holds_it_that_opens_and_closes_other_files(tmp_path: Path) -> None:
    segment = tmp_path / "psm_held"
    segment.touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(segment)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
        for _ in range(30):
            assert remove([segment]) == []
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    assert remove([segment]) == [segment]
