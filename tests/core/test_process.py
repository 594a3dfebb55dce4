"""External commands: no shell, bounded, the whole group killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run


def test_output_and_exit_code() -> None:
    done = run(["sh", "-c", "cat; echo err >&2; exit 3"], 5.0, check=False, stdin="in")
    assert (done.returncode, done.stdout, done.stderr) == (3, "in", "err\n")


def test_a_failure_carries_everything() -> None:
    with pytest.raises(CommandError, match=r"exit code 3: broken") as caught:
        run(["sh", "-c", "echo out; echo broken >&2; exit 3"], 5.0)
    error = caught.value
    assert (error.argv[0], error.returncode, error.stdout, error.stderr) == ("sh", 3, "out\n", "broken\n")


def test_a_missing_command_is_said() -> None:
    with pytest.raises(CommandError, match=r"no-such-command-here: cannot start") as caught:
        run(["no-such-command-here"], 5.0)
    assert caught.value.returncode is None


def test_arguments_are_never_read_by_a_shell() -> None:
    assert run(["printf", "%s", "$(id); `id` && x"], 5.0).stdout == "$(id); `id` && x"


def test_bytes_that_are_no_text_do_not_fail() -> None:
    assert run(["printf", r"\377ok"], 5.0).stdout == "\ufffdok"


def test_a_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    with pytest.raises(CommandError, match=r"no answer within 1 s") as caught:
        run([sys.executable, "-c", program], 1.0)
    assert time.monotonic() - began < 10.0
    assert caught.value.stdout == "begun\n"
    for pid in map(int, pids.read_text().split()):
        assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a killed process disappears (it may be a zombie until its parent looks)."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False
