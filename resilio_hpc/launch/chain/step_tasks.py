"""The decision of the first task of an srun step about the run, passed to the other tasks by a small file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilio_hpc.core.durable import create_exclusive, write_atomic
from resilio_hpc.core.trusted_files import read_object

POLL_S = 0.1


def tell(file: Path, news: Mapping[str, Any]) -> None:
    """Write ``news``, which are not empty, for the other tasks. Raises OSError."""
    write_atomic(file, json.dumps(news).encode())


def hear(
    file: Path, limit_s: float, otherwise: Callable[[], dict[str, Any] | None] = lambda: None
) -> dict[str, Any] | None:
    """Wait for the first task's news in ``file``, or for news from ``otherwise``; None: none came in time.

    Raises OSError where the file cannot be made.
    """
    create_exclusive(file, b"{}", 0o644)  # on NFS, a name that was looked for in vain may stay missing
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        news = read_object(file) or otherwise()
        if news:
            return news
        time.sleep(POLL_S)
    return None
