"""A command that was started with closed or broken standard streams: no file of its own gets their numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environments import scrubbed

PROGRAM = """
import os, sys
from resilio_hpc.core import standard_streams
standard_streams.make_usable()
opened = os.open("/dev/null", os.O_RDONLY)
print("said", file=sys.stderr, flush=True)
os.system("true")
sys.exit(0 if opened > 2 and sys.stdin is not None and sys.stdout is not None else 3)
"""


@pytest.mark.parametrize("redirections", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", "<&-", ""])
def test_it_runs(redirections: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, PROGRAM]
    ended = subprocess.run(command, env=scrubbed(), capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert ended.stderr == (b"said\n" if "2>" not in redirections else b"")
