"""The run directory on the shared file system: one per run, kept across the jobs of a chain.

    run.json            who and when; created exclusively, names the run
    secret              the run's secret, 0600
    epoch.N             who was controller N (exclusively created)
    witness.JOB.E.N     which half of a group of voters went on (exclusively created)
    ledger/<writer>.jsonl   what happened
    logs/<round>/<node>/    the ranks' output
    checkpoints/        see resilio_hpc.ckpt
    chain.json          the jobs of the chain
    links/<job>.json    how each job's part ended; {} until then
    verdict.json        how the run ended, or its last part
    status.json         what the controller sees now

This module is the layout and the small blocking operations; agents do theirs in a child (launch/storage.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilio_hpc.core.durable import create_exclusive, write_atomic
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.wire import new_secret
from resilio_hpc.launch.ballot import EpochRecord

VERSION = 1


@dataclass(frozen=True)
class Run:
    """A run's identity."""

    path: Path
    run_id: str
    secret: bytes


def open_run(path: Path, wait_s: float = 10.0, program: Sequence[str] = ()) -> Run:
    """Create the run directory, or join it where it exists. Several nodes may do this at the same time.

    ``program``: for which it is created (``run_choice``)."""
    try:
        for name in ("ledger", "logs", "checkpoints", "links"):
            (path / name).mkdir(parents=True, exist_ok=True)
        create_exclusive(path / "secret", new_secret() + b"\n", 0o600)
        identity = {"version": VERSION, "run_id": secrets.token_hex(6), "created": time.time(), "program": [*program]}
        create_exclusive(path / "run.json", json.dumps(identity).encode(), 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot use the run directory {path}: {error.strerror}; choose another with --run-dir"
        ) from None
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return read_run(path)
        except FileNotFoundError:  # a caching file system may show it late
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{path}/run.json does not appear: is {path} the same directory on every node?"
                ) from None
            time.sleep(0.1)


def read_run(path: Path) -> Run:
    """The identity of an existing run directory. Raises FileNotFoundError or UsageError."""
    text = (path / "run.json").read_text()
    secret_path = path / "secret"
    status = secret_path.stat()
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise UsageError(f"{secret_path} must belong to you and be closed to others: chmod 600 {secret_path}")
    try:
        identity = json.loads(text)
        if int(identity["version"]) > VERSION:
            raise UsageError(f"{path} was made by a newer resilio_hpc (format {identity['version']}): update this one")
        return Run(path, str(identity["run_id"]), secret_path.read_bytes().strip())
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path}/run.json is not one of ours: choose another directory with --run-dir") from None


def node_directories(run_id: str, node: str) -> tuple[Path, Path]:
    """This node's private directories of a run: (sockets, spool), (snapshot arenas in shared memory)."""
    digest = hashlib.sha256(f"{run_id}:{node}".encode()).hexdigest()[:12]  # short: a socket path holds 107 bytes
    base = Path(os.environ.get("RESILIO_LOCAL_DIR") or "/tmp")
    return base / f"resilio-{os.geteuid()}-{digest}", Path("/dev/shm") / f"resilio-{os.geteuid()}-{digest}"


def make_private(path: Path) -> None:
    """Create a directory of mode 0700; refuse one that somebody else prepared."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        pass  # no directory: refused below
    status = path.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} belongs to somebody else: set RESILIO_LOCAL_DIR to a directory of yours")
    path.chmod(0o700)


# -- epochs ----------------------------------------------------------------------------------------------------------


def newest_epoch(path: Path) -> EpochRecord | None:
    """The newest epoch record, or None."""
    numbers = [int(name[6:]) for name in os.listdir(path) if name.startswith("epoch.") and name[6:].isdigit()]  # noqa: PTH208
    if not numbers:
        return None
    record = json.loads((path / f"epoch.{max(numbers)}").read_text())
    return EpochRecord(int(record["epoch"]), str(record["node"]), str(record["endpoint"]), str(record["job"]))


def read_pulse(path: Path, epoch: int) -> int | None:
    """A counter that moves while the controller of this epoch leads; None when there is none (yet)."""
    try:  # of a file that is long where there are many agents, all of which ask
        with (path / "status.json").open("rb") as file:
            head = file.read(200)
    except OSError:
        return None
    found = {name: re.search(rb'"%s": *([0-9]{1,18})[,}]' % name, head) for name in (b"pulse", b"epoch")}
    pulse, of = (int(match[1]) if match else None for match in found.values())
    return pulse if of == epoch else None


def claim_epoch(path: Path, record: EpochRecord) -> bool:
    """Create ``epoch.N`` exclusively; False when somebody else holds it. Asked again, the holder still does."""
    data = json.dumps(asdict(record)).encode()
    file = path / f"epoch.{record.epoch}"
    return create_exclusive(file, data) or file.read_bytes() == data


def claim_witness(path: Path, job: str, witness: str, node: str) -> str:
    """Create a witness of a job's voters for ``node``, unless it is there: the node that has it."""
    file = path / f"witness.{job}.{witness}"
    return node if create_exclusive(file, node.encode()) else file.read_text()


def last_round(path: Path) -> int:
    """The highest round that left logs, -1 when there is none."""
    return max((int(name) for name in os.listdir(path / "logs") if name.isdigit()), default=-1)  # noqa: PTH208


# -- verdicts --------------------------------------------------------------------------------------------------------


def write_verdict(path: Path, job: str, verdict: dict[str, Any]) -> None:
    """How a job's part of the run ended: kept per job, and as the run's newest verdict."""
    data = json.dumps({"v": VERSION, "time": time.time(), "job": job, **verdict}, indent=1).encode()
    write_atomic(path / "links" / f"{job}.json", data)
    write_atomic(path / "verdict.json", data)


def expect_verdict(path: Path, job: str) -> None:
    """Create the file of a part's verdict, empty. An NFS client may hide a new name for a minute from whoever has
    looked for it in vain, and shows the new content of a known one at once."""
    create_exclusive(path / "links" / f"{job}.json", b"{}", 0o644)


def read_verdict(path: Path, job: str | None = None) -> dict[str, Any] | None:
    """The verdict of a job's part, or the run's newest; None when there is none (yet)."""
    file = path / "links" / f"{job}.json" if job else path / "verdict.json"
    try:
        verdict = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return verdict if isinstance(verdict, dict) and verdict else None
