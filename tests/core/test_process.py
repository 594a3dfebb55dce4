"""External commands: no shell, bounded, the whole group killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import run
from tests.support.waiting import PATIENCE_S, until


def test_output_and_exit_code() -> None:
    done = run(["sh", "-c", "cat; echo err >&2; exit 3"], PATIENCE_S, check=False, stdin="in")
    assert (done.returncode, done.stdout, done.stderr) == (3, "in", "err\n")


def test_a_failure_carries_everything() -> None:
    with pytest.raises(CommandError, match=r"exit code 3: broken") as caught:
        run(["sh", "-c", "echo out; echo broken >&2; exit 3"], PATIENCE_S)
    error = caught.value
    assert (error.argv[0], error.returncode, error.stdout, error.stderr) == ("sh", 3, "out\n", "broken\n")


def test_a_missing_command_is_said() -> None:
    with pytest.raises(CommandError, match=r"no-such-command-here: cannot start") as caught:
        run(["no-such-command-here"], PATIENCE_S)
    assert caught.value.returncode is None


def test_arguments_are_never_read_by_a_shell() -> None:
    assert run(["printf", "%s", "$(id); `id` && x"], PATIENCE_S).stdout == "$(id); `id` && x"


def test_bytes_that_are_no_text_do_not_fail() -> None:
    assert run(["printf", r"\377ok"], PATIENCE_S).stdout == "\ufffdok"


def test_a_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = 'sleep 600 & echo $$ $! > "$0"; echo begun; wait'
    for timeout_s in (0.2, 2.0, 20.0, 200.0):  # until it has begun in time
        with pytest.raises(CommandError, match=rf"no answer within {timeout_s:g} s") as caught:
            run(["sh", "-c", program, str(pids)], timeout_s)
        if caught.value.stdout:
            break
    assert caught.value.stdout == "begun\n"
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: gone(pid), "the end of the group")


def gone(pid: int) -> bool:
    """Whether a process has ended (it may be a zombie until its parent looks)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
