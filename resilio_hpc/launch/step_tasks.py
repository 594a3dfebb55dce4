"""What the first task of an srun step has decided of the run, told to the other tasks by a small file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from resilio_hpc.core.durable import create_exclusive, write_atomic
from resilio_hpc.core.trusted_files import read_object
from resilio_hpc.launch import link_lease, run_directory

PATIENCE_S = 60.0 + link_lease.LIMIT_S  # for the first task to take its turn
POLL_S = 0.2


def tell(run_path: Path, key: str, news: dict[str, Any]) -> None:
    """``news``: ``{"ready": True, "begins": EPOCH}`` or ``{"refused": WHY}``; ``key``: the launch's part of the run."""
    write_atomic(_file(run_path, key), json.dumps(news).encode())


def hear(run_path: Path, key: str) -> int | str:
    """Wait for the first task: the epoch with which the part begins, or why there is nothing to do."""
    create_exclusive(_file(run_path, key), b"{}", 0o644)  # a name that is looked for in vain stays missing on an NFS
    run_directory.expect_verdict(run_path, key)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        news = read_object(_file(run_path, key)) or {}
        if news.get("ready"):
            return int(news["begins"])
        if "refused" in news:
            return str(news["refused"])
        ended = run_directory.read_verdict(run_path, key)
        if ended is not None:
            return str(ended.get("reason", "this job has nothing to do"))
        time.sleep(POLL_S)
    return "the first task of this step did not take its turn: nothing to do here"


def _file(run_path: Path, key: str) -> Path:
    return run_path / "links" / f"{key}.ready"
