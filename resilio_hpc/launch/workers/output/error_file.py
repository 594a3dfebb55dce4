"""How a rank ended: the error file that it may have written, and its exit as text.

The file is torchrun's: what ``torch.distributed.elastic.multiprocessing.errors.record`` writes to
``$TORCHELASTIC_ERROR_FILE``, {"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": "…"}}} or
{"message": "…", "timestamp": …}. The user's process writes it, so any content is possible, and none may do harm.
"""

from __future__ import annotations

import json
import os
import signal as signals
import stat
from pathlib import Path
from typing import Any

from msgspec import Struct

from resilio_hpc.core.rank_error import MAX_MESSAGE, MAX_TRACEBACK, clean

MAX_BYTES = 1024 * 1024


class RankError(Struct, frozen=True):
    """A rank's own report of its error. ``traceback`` may be empty; ``time`` in Unix seconds."""

    message: str
    traceback: str
    time: float


def read_error(path: Path) -> tuple[RankError | None, str]:
    """Return the error in ``path`` and "", or None and why the file was ignored ("" where there is none).

    Never raises.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"error file {path} ignored: {error.strerror}"
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None, f"error file {path} ignored: not a regular file"
        if status.st_size > MAX_BYTES:
            return None, f"error file {path} ignored: {status.st_size} bytes are too many"
        content = os.read(fd, MAX_BYTES)
    except OSError as error:
        return None, f"error file {path} ignored: {error.strerror}"
    finally:
        os.close(fd)
    if not content.strip():
        return None, ""
    recorded = parse_error(content, status.st_mtime)
    return recorded, "" if recorded else f"error file {path} ignored: not what a rank's error looks like"


def parse_error(content: bytes, written: float) -> RankError | None:
    """Return the error in ``content``, if any. Pure.

    ``written`` (the file's time) refines the time stamp, which has whole seconds, or replaces a bad one.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, str):
        return RankError(clean(message, MAX_MESSAGE), "", _time_of(data, written))
    text = message.get("message") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(text, str):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    callstack = extra.get("py_callstack")
    stack = clean(callstack, MAX_TRACEBACK) if isinstance(callstack, str) else ""
    return RankError(clean(text, MAX_MESSAGE), stack, _time_of(extra, written))


def _time_of(data: dict[str, Any], written: float) -> float:
    stamp = data.get("timestamp")
    try:
        whole = int(stamp) if isinstance(stamp, int | str) else None
    except ValueError:
        whole = None
    # torch stores whole seconds, too coarse to tell which rank failed first; the file's own time is finer
    if whole is None or not 0 <= whole < 1 << 40 or abs(written - whole) <= 2:
        return written
    return float(whole)


_EXIT_WORDS = {
    0: "ended normally",
    1: "failed (an uncaught exception, or sys.exit(1))",
    2: "failed (usually wrong arguments to the script)",
    98: "could not restore the checkpoint it was given",
    126: "could not be executed (permission?)",
    127: "was not found (command or shared library missing)",
}
_SIGNAL_HINTS = {
    "SIGKILL": "often the kernel's or Slurm's out-of-memory killer: see dmesg, sacct -o MaxRSS, --mem",
    "SIGSEGV": "a crash in native code: set PYTHONFAULTHANDLER=1 to see where",
    "SIGBUS": "often /dev/shm is full, or a mapped file was truncated",
    "SIGABRT": "an assertion or uncaught C++ exception: see the last lines on stderr",
    "SIGFPE": "integer division by zero in native code",
    "SIGILL": "a binary built for another CPU",
    "SIGTERM": "asked to stop",
    "SIGINT": "interrupted",
    "SIGXCPU": "its CPU time limit is spent",
    "SIGPIPE": "no process reads its output any more",
    "SIGUSR1": "a warning signal (sbatch --signal?) that the script does not handle",
    "SIGUSR2": "a warning signal (sbatch --signal?) that the script does not handle",
}


def describe_exit(exit_code: int | None, signal: int | None) -> str:
    """Return how a process ended, in one line. Give the argument that applies; shells report signal N as 128 + N."""
    if signal is None and exit_code is not None and exit_code < 0:
        signal, exit_code = -exit_code, None
    through_shell = signal is None and exit_code is not None and 128 < exit_code < 128 + 65
    number = exit_code - 128 if through_shell and exit_code is not None else signal
    if number is not None and (name := _signal_name(number)):
        hint = f" ({_SIGNAL_HINTS[name]})" if name in _SIGNAL_HINTS else ""
        code = f"exit code {exit_code}: " if through_shell else ""
        return f"{code}killed by {name}{hint}"
    if number is not None and not through_shell:
        return f"killed by signal {number}"
    if exit_code is None:
        return "ended in an unknown way"
    words = _EXIT_WORDS.get(exit_code, "failed")
    return words if exit_code == 0 else f"{words}, exit code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return ""
