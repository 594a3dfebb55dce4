"""The end of a job, which may be moved while it runs (``scontrol update TimeLimit=``), in a file for the agents.

Each job of a run has its own, ``links/<job>.end`` in the run directory: Unix seconds as text, replaced atomically. It
exists only where the end has changed since the job's start, or was not known then.
"""

from __future__ import annotations

import math
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.json_fields import Fields

UNLIMITED = "unlimited"


def _file(run_path: Path, key: str) -> Path:
    return run_path / "links" / f"{key}.end"


def write_end_time(run_path: Path, key: str, end_time: float | None) -> None:
    """Tell the agents of a job (``placements.Site.key``) when it ends; None: never."""
    text = UNLIMITED if end_time is None else repr(end_time)
    write_atomic(_file(run_path, key), text.encode())


def read_end_time(run_path: Path, key: str) -> float | None:
    """Return the job's end as it was last changed, ``math.inf`` for never; None when it was not changed.

    Raises Untrusted.
    """
    try:
        text = trusted_files.read_text(_file(run_path, key))
        end_time = math.inf if text == UNLIMITED else float(text)
    except (OSError, ValueError):
        return None
    return end_time if text == UNLIMITED else Fields({"end": end_time}).time("end")
