"""The run directory on the shared file system: one per run, kept across the jobs of a chain.

    run.json            who and when; created exclusively, names the run
    secret              the run's secret, 0600
    epoch.N             who was controller N (exclusively created)
    witness.JOB.E.N     which half of a group of voters went on (exclusively created)
    ledger/<writer>.jsonl   what happened
    logs/<round>/<node>/    the ranks' output
    checkpoints/        see resilio_hpc.ckpt; a link with --checkpoint-dir
    chain.json          the jobs of the chain
    links/<job>.json    how each job's part ended; {} until then
    limits.json         how long the run may go without a sign, and what that was learned from
    verdict.json        how the run ended, or its last part
    status.json         what the controller sees now
    stdin               with --stdin: the standard input of that rank, 0600

Only its user writes in it: what is read is opened by ``core.trusted_files``, which refuses everything else.

This module is the layout and the small blocking operations; agents do theirs in a child (launch/rundir/io_worker.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct, to_builtins

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import create_exclusive, write_atomic
from resilio_hpc.core.errors import Untrusted, UsageError
from resilio_hpc.core.json_fields import Fields, parse_object
from resilio_hpc.core.wire import new_secret
from resilio_hpc.launch.protocol.vote import EpochRecord

VERSION = 1
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
STDIN = "stdin"


class RunIdentity(Struct, frozen=True):
    """A run's identity."""

    path: Path
    run_id: str
    secret: bytes


def open_run(path: Path, wait_s: float = 10.0, program: Sequence[str] = ()) -> RunIdentity:
    """Create the run directory, or join it where it exists. Several nodes may do this at the same time.

    ``program``: for which it is created (``run_choice``). Raises UsageError, which is Untrusted where another user
    could change what is in it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the parent may be shared
        trusted_files.make_directory(path)
        path = trusted_run(path)
        for name in ("ledger", "logs", "checkpoints", "links"):
            if not (path / name).is_symlink():  # see ``checkpoint_link``
                trusted_files.make_directory(path / name)
        with contextlib.suppress(FileNotFoundError):
            trusted_files.close_directories(path / "checkpoints")  # an older version left its steps open to the group
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


def trusted_run(path: Path) -> Path:
    """Return the real path of a run directory that only its user can change. Raises Untrusted, OSError."""
    try:
        return trusted_files.run_directory(path)
    except Untrusted as error:
        raise Untrusted(f"{error}; choose another with --run-dir") from None


def read_run(path: Path) -> RunIdentity:
    """Return the identity of an existing run directory. Raises FileNotFoundError or UsageError."""
    text = trusted_files.read_text(path / "run.json")
    secret = _read_secret(path / "secret")
    fields = Fields.of(parse_object(text))
    version, run_id = fields.whole("version"), fields.text("run_id")
    if version is not None and version > VERSION:
        raise UsageError(f"{path} was made by a newer resilio_hpc (format {version}): update this one")
    if version is None or not _RUN_ID.fullmatch(run_id):
        raise UsageError(f"{path}/run.json is not one of ours: choose another directory with --run-dir")
    return RunIdentity(path, run_id, secret)


def _read_secret(path: Path) -> bytes:
    fd = trusted_files.open_file(path)
    try:
        if os.fstat(fd).st_mode & 0o077:
            raise UsageError(f"{path} must be closed to others: chmod 600 {path}")
        return os.read(fd, 4096).strip()
    finally:
        os.close(fd)


def keep_stdin(path: Path, source: BinaryIO) -> None:
    """Keep ``source``, read to its end, for a rank: each of its lives reads it from the beginning.

    Raises UsageError.
    """
    partial = path / f".{STDIN}.{os.getpid()}"
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as target:
            shutil.copyfileobj(source, target)
        partial.replace(path / STDIN)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"--stdin: the standard input cannot be kept in {path}: {error.strerror}") from None


# -- epochs ----------------------------------------------------------------------------------------------------------


def newest_epoch(path: Path) -> EpochRecord | None:
    """Return the newest epoch record, or None. Raises UsageError for one that is damaged."""
    numbers = [int(name[6:]) for name in os.listdir(path) if name.startswith("epoch.") and name[6:].isdecimal()]  # noqa: PTH208
    if not numbers:
        return None
    file = path / f"epoch.{max(numbers)}"
    f = Fields.of(parse_object(trusted_files.read(file)))
    epoch = f.whole("epoch")
    if epoch is None:
        raise UsageError(f"{file} is damaged: remove it if no job of this run goes on")
    return EpochRecord(epoch, f.text("node"), f.text("endpoint"), f.text("job"))


def read_pulse(path: Path, epoch: int) -> int | None:
    """Return a counter that moves while the controller of this epoch leads; None without one."""
    try:  # with many agents the file is long, and all of them ask
        fd = trusted_files.open_file(path / "status.json")
        try:
            head = os.read(fd, 200)
        finally:
            os.close(fd)
    except OSError:
        return None
    found = {name: re.search(rb'"%s": *([0-9]{1,18})[,}]' % name, head) for name in (b"pulse", b"epoch")}
    pulse, of = (int(match[1]) if match else None for match in found.values())
    return pulse if of == epoch else None


def claim_epoch(path: Path, record: EpochRecord) -> bool:
    """Create ``epoch.N`` exclusively; return False when another agent holds it, True for its holder."""
    data = json.dumps(to_builtins(record)).encode()
    file = path / f"epoch.{record.epoch}"
    return create_exclusive(file, data) or trusted_files.read(file) == data


def claim_witness(path: Path, job: str, witness: str, node: str) -> str:
    """Create a witness of a job's voters for ``node`` unless it exists. Return its holder."""
    file = path / f"witness.{job}.{witness}"
    return node if create_exclusive(file, node.encode()) else trusted_files.read_text(file)


def last_round(path: Path) -> int:
    """Return the highest round that left logs, -1 without one."""
    return max((int(name) for name in os.listdir(path / "logs") if name.isdecimal()), default=-1)  # noqa: PTH208


# -- verdicts --------------------------------------------------------------------------------------------------------


def write_verdict(path: Path, job: str, verdict: dict[str, Any]) -> None:
    """Write how a job's part of the run ended: the job's verdict, and the run's newest."""
    data = json.dumps({"v": VERSION, "time": time.time(), "job": job, **verdict}, indent=1).encode()
    write_atomic(path / "links" / f"{job}.json", data)
    write_atomic(path / "verdict.json", data)


def expect_verdict(path: Path, job: str) -> None:
    """Create the file of a part's verdict, empty.

    An NFS client may hide a new name for a minute from a host that has looked for it in vain, and shows the new content
    of a known one at once.
    """
    create_exclusive(path / "links" / f"{job}.json", b"{}", 0o644)


def read_verdict(path: Path, job: str | None = None) -> dict[str, Any] | None:
    """Return the verdict of a job's part, or the run's newest; None without one."""
    file = path / "links" / f"{job}.json" if job else path / "verdict.json"
    return trusted_files.read_object(file) or None
