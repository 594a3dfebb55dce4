"""The rank's side of a look at its stacks. Loaded by a path, before the program runs: standard library only."""

from __future__ import annotations

import faulthandler
import os
import signal

STACK_SIGNAL = signal.SIGRTMAX - 4  # no library that we know uses it
STACK_VARIABLE = "RESILIO_STACK_FILE"
_kept: list[object] = []  # of another round's file, once it is not written to


def write_when_asked() -> None:
    """Let the signal write all threads' stacks into the file that the environment names. It takes no Python lock."""
    path = os.environ.get(STACK_VARIABLE)
    if not path:
        return
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - it stays open as long as the rank
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        return  # the rank trains without it
    _kept[:] = [file]
