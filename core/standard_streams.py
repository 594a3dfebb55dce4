"""A process's standard streams, in any state: closed, on a full disk, without a reader."""

from __future__ import annotations

import contextlib
import io
import os
import sys


class _Forgiving(io.FileIO):
    """A stream that drops what cannot be written: nothing depends on it."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def say(text: str) -> None:
    """Write ``text`` on standard error, as a line of ours. Where that fails, nothing else does."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            print(f"resilio: {text}", file=sys.stderr, flush=True)


def make_usable() -> None:
    """Make the streams usable, before any file is opened.

    A standard error that fails changes no exit code from now on.
    """
    _open_missing()
    _let_stderr_fail()


def _open_missing() -> None:
    """Open the descriptors that are closed, so that no other file gets their numbers."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)  # the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _let_stderr_fail() -> None:
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Forgiving(2, "w", closefd=False)), encoding, "backslashreplace", line_buffering=True
        )
