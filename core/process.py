"""The one way to run an external command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import CommandError


@dataclass(frozen=True)
class Completed:
    """What a finished command printed and returned."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    timeout_s: float,
    *,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: str = "",
) -> Completed:
    """Run ``argv`` (never through a shell) and return its output.

    The command gets a process group of its own; on timeout the whole group is killed. Raises CommandError when the
    command is missing, times out, or (with ``check``) returns other than 0.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(argv, None, why=f"cannot start ({error.strerror})") from error
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        try:  # a child in uninterruptible sleep, or one that left the group, must not block the caller
            stdout, stderr = process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            stdout = stderr = ""
        raise CommandError(argv, None, stdout, stderr, why=f"no answer within {timeout_s:g} s") from None
    except BaseException:
        _kill_group(process.pid)
        raise
    if check and process.returncode != 0:
        raise CommandError(argv, process.returncode, stdout, stderr)
    return Completed(tuple(argv), process.returncode, stdout, stderr)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
