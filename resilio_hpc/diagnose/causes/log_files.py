"""The ends of log files, as streams of lines."""

from __future__ import annotations

import os
from pathlib import Path

from resilio_hpc.core import regular_file
from resilio_hpc.core.errors import UsageError, os_error_text
from resilio_hpc.diagnose.causes.judge import LogStream

MOST_BYTES = 16 << 20
MOST_LINES = 200_000
"""Of a longer file only the end is read: a cause stands near it, and progress followed what stands far before."""

MOST_COUNTED = 1 << 30
"""Lines before the end are counted in so many bytes; of a longer file lines are numbered from where its end begins."""


def read(path: Path, name: str = "", share: int = 1) -> LogStream:
    """Return the last lines of a file, one of ``share`` that are read together.

    Raises UsageError where it cannot be read, or is no file (a pipe, a device).
    """
    name = name or str(path)
    try:
        descriptor = regular_file.open_file(path)
        with open(descriptor, "rb") as file:
            start = max(0, os.fstat(descriptor).st_size - MOST_BYTES // share)
            skipped = 0
            if start > MOST_COUNTED:
                name = f"{name} from byte {start}"
                file.seek(start)
                file.readline()
            elif start:
                skipped = _count_lines(descriptor, start)
                file.seek(start)
                skipped += bool(file.readline())  # the rest of a line that was cut
            text = file.read(MOST_BYTES // share).decode(errors="replace")
    except OSError as error:
        raise UsageError(os_error_text(error, name)) from None
    lines = text.removesuffix("\n").split("\n")
    more = max(0, len(lines) - MOST_LINES // share)
    return LogStream(name, lines[more:], first=skipped + more + 1)


def _count_lines(descriptor: int, end: int) -> int:
    found = position = 0
    while position < end:
        part = os.pread(descriptor, min(1 << 20, end - position), position)
        if not part:
            break
        found += part.count(b"\n")
        position += len(part)
    return found
