"""The agent's own limit on open files is as high as it may be; a rank's is what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import resource
from resilio_hpc.core.errors import LaunchError
from resilio_hpc.launch.workers.forking import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))
before = open_files.raise_limit()
assert (before, resource.getrlimit(resource.RLIMIT_NOFILE)) == (500, (600, 600))
open_files.give_back(before)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500, 600)
for too_much in (700, resource.RLIM_INFINITY):
    open_files.give_back(too_much)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, 600)
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
try:
    with open_files.limit_told():
        files = [open("/dev/null") for _ in range(30)]
except LaunchError as error:
    assert str(error) == "Too many open files: raise the limit, which is 24 (ulimit -Hn)"
"""


def test_a_soft_limit_is_raised_to_the_hard_one_and_given_back() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=PATIENCE_S)


def test_too_low_a_limit_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    launch = f"ulimit -n 24; exec {sys.executable} -m resilio_hpc.cli.resilio_launch --standalone --no-torch train.py"
    done = subprocess.run(
        ["sh", "-c", launch], cwd=tmp_path, env=scrubbed(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "the limit is 24: raise it (ulimit -Hn)" in done.stderr
