"""What a drill leaves for people to look at: a folder with the run's ledger and output, stamps, and Slurm's logs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines

_LEFT_OUT = shutil.ignore_patterns("checkpoints", "home", "secret")
RECORD = "drill.json"


def keep_evidence(cluster: DevCluster[RackMachines], target: Path, only: str = "") -> None:
    """Copy what the runs of a cluster left, without checkpoints. ``only``: of runs whose names begin so."""
    shutil.rmtree(target, ignore_errors=True)
    _copy(cluster.shared, target / "shared", only)
    for machine in cluster.machines.states():
        shutil.copytree(cluster.layout.log(machine), target / "logs" / machine)
        if machine in cluster.nodes:
            _copy(cluster.layout.nvme(machine), target / "nvme" / machine, only)


def _copy(source: Path, target: Path, only: str) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if not path.name.startswith(only) or path.name in ("home", "secret"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target / path.name, ignore=_LEFT_OUT, symlinks=True)
        else:
            shutil.copy2(path, target / path.name, follow_symlinks=False)


def write_record(target: Path, record: Mapping[str, Any]) -> Path:
    """Write what the drill came to as ``drill.json``. Return the file. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    file = target / RECORD
    write_atomic(file, (json.dumps({"v": 1, **record}, indent=1) + "\n").encode(), durable=False)
    return file


def new_folder(parent: Path, name: str) -> Path:
    """Return a folder for a drill that is not there yet. It is made when something is kept."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    found, number = parent / stem, 1
    while found.exists():
        number += 1
        found = parent / f"{stem}.{number}"
    return found
