"""The command line that ps, pgrep and py-spy show for a forked rank: its script's instead of the zygote's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path


def set_title(argv: Sequence[str]) -> None:
    """Overwrite this process's argument area (proc(5): arg_start, arg_end); what does not fit is cut."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49; the state, field 3, is the first here
    if start <= 0 or end <= start:
        return
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
