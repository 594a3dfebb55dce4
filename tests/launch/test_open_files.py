"""The agent's own limit on open files is as high as it may be; a rank's is what it was."""

from __future__ import annotations

import subprocess
import sys

from tests.support.waiting import PATIENCE_S

PROGRAM = """
import resource
from resilio_hpc.launch import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))
before = open_files.raise_limit()
assert (before, resource.getrlimit(resource.RLIMIT_NOFILE)) == (500, (600, 600))
open_files.give_back(before)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (500, 600)
for too_much in (700, resource.RLIM_INFINITY):
    open_files.give_back(too_much)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, 600)
"""


def test_a_soft_limit_is_raised_to_the_hard_one_and_given_back() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=PATIENCE_S)
