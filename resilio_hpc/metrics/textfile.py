"""The file for node_exporter's textfile collector: replaced with each sample, removed at the end of the job."""

from __future__ import annotations

import os
import time
from pathlib import Path

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.metrics.sheet import neutral

STALE_S = 600.0  # a file of a job that ended without removing it


def path_of(directory: str, run_id: str, node: str) -> Path:
    """Return the path of a run's file on a node."""
    return Path(directory) / f"resilio-{neutral(run_id)}-{neutral(node)}.prom".replace("/", "_")


def write(path: Path, text: bytes) -> None:
    """Replace the file, which node_exporter's user may read. Raises OSError."""
    write_atomic(path, text, 0o644, durable=False)


def remove_stale(directory: str, now: float | None = None) -> None:
    """Remove files of this user's runs that are not written any more: they would be shown for ever."""
    now = time.time() if now is None else now
    for path in Path(directory).glob("resilio-*.prom"):
        try:
            status = path.lstat()
            if status.st_uid == os.geteuid() and now - status.st_mtime > STALE_S:
                path.unlink()
        except OSError:
            continue
