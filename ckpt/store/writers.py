"""Which processes write to a directory of checkpoints, so that two jobs or saves do not undo each other's work.

Each step names its writer, and so does a note in each staging directory. On one machine the kernel tells whether that
process lives. A writer on another machine shows life by changes: steps that appear, files that grow. No file is locked
and no clocks are compared.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import Manifest, Writer
from resilio_hpc.ckpt.store.backend import EntryKind
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core import regular_file
from resilio_hpc.core.errors import CheckpointError

NOTE = ".writer-"
_NOTE_LIMIT = 1 << 16
STALL_S = 30.0
"""An NFS client may show a file of another node as it was so long ago."""
_first_order: dict[Path, int] = {}
"""Of each directory: the newest commit that was there when this process committed its first step."""
_threads: dict[Path, threading.Thread] = {}
"""Which thread of this process fills a staging directory of torch.distributed.checkpoint."""
_watched: dict[Path, tuple[object, float]] = {}
"""What was seen in another machine's staging directory, and since when (monotonic)."""


def this_process(job: str) -> Writer:
    """Return this process as a writer of the job of that name."""
    return Writer(job, socket.gethostname()[:64], _machine(), os.getpid(), _begun(os.getpid()) or 0)


@cache
def process_job() -> str:
    """Return a job name for a job of one process, this one."""
    return os.urandom(16).hex()


os.register_at_fork(after_in_child=process_job.cache_clear)


def others_at_work(directory: Path, me: Writer, found: Sequence[Manifest]) -> dict[int, Writer]:
    """Return the committed steps of other jobs that are at work, with their writers. ``found``: all committed steps."""
    before = _first_order.setdefault(directory, max((manifest.order for manifest in found), default=0))
    others: dict[int, Writer] = {}
    for manifest in found:
        writer = manifest.writer
        if writer and is_another(writer, me):
            lives = is_alive(writer)
            if lives or (lives is None and manifest.order > before):
                others[manifest.step] = writer
    return others


def check_former(directory: Path, me: Writer | None, former: Manifest | None) -> None:
    """Raise CheckpointError where the step to be replaced belongs to another job that is at work."""
    if me is not None and former is not None and others_at_work(directory, me, [former]):
        assert former.writer
        raise CheckpointError(f"step {former.step} is another job's: {words(directory, former.writer)}")


def is_another(writer: Writer, me: Writer) -> bool:
    """Return whether it is of another job."""
    return writer.job != me.job and (writer.machine, writer.pid, writer.begun) != (me.machine, me.pid, me.begun)


def words(directory: Path, writer: Writer) -> str:
    """Return the message that another job writes there."""
    return (
        f"another job (process {writer.pid} on {writer.host}) writes checkpoints to {directory}, too; neither removes "
        "or replaces steps of the other: give each job a directory of its own"
    )


def make_staging(staging: Path, me: Writer | None) -> None:
    """Make a staging directory, unless it exists, with a note that this process fills it. Raises OSError.

    The note comes at once: without it, another job would take the directory for a leftover. A link of that name is
    removed.
    """
    store = store_of(staging)

    def is_made() -> bool:
        try:
            store.make_new_directory(staging)
        except FileExistsError:
            return False
        return True

    store.make_directory(staging.parent)  # durable, also where a process that died has made it
    is_new = is_made()
    if not is_new and (found := store.look(staging)) is not None and found.kind is EntryKind.OTHER:
        store.remove(staging, ignore_errors=False)
        is_new = is_made()
    if me is not None:
        store.create(staging / f"{NOTE}{me.pid}", msgspec.json.encode(me))
    if is_new:
        store.sync(staging.parent)


def take_back(staging: Path, me: Writer) -> None:
    """Take back a save that has failed. Raises nothing."""
    with contextlib.suppress(OSError):
        store_of(staging).remove(staging / f"{NOTE}{me.pid}")


def begin(staging: Path, me: Writer) -> None:
    """Note that this thread fills a staging directory, and no other: a thread makes one save after the other."""
    for path, thread in list(_threads.items()):
        if thread is threading.current_thread() or not thread.is_alive():
            _threads.pop(path, None)
    _threads[staging] = threading.current_thread()
    make_staging(staging, me)


def end(staging: Path) -> None:
    """Note that nothing more is written there."""
    _threads.pop(staging, None)


def await_threads(directory: Path) -> None:
    """Wait until no other thread of this process fills a staging directory there."""
    for staging, thread in list(_threads.items()):
        if staging.parent == directory and thread is not threading.current_thread():
            thread.join()


def at_work(staging: Path, has_session: bool, patience_s: float = 0.0, stall_s: float = STALL_S) -> Writer | None:
    """Return the writer that fills a staging directory; None where its writers are dead, hang, or gave that save up.

    ``has_session``: it is not of torch.distributed.checkpoint, whose saves each have a thread. ``patience_s``: how long
    to wait for the end of such a thread. ``stall_s``: a writer on another machine that changes nothing for so long is
    dead. Raises OSError where that cannot be read.
    """
    for path in notes(staging):
        writer = _read_note(path)
        if writer is None:
            continue
        if not has_session and writer == this_process(writer.job):
            lives: bool | None = _thread_lives(staging, patience_s)
        else:
            lives = is_alive(writer)
        if lives or (lives is None and _changes(staging, stall_s)):
            return writer
    return None


def _read_note(path: Path) -> Writer | None:
    """Return the writer; None where it is gone, or is no note. Raises OSError where it cannot be read: it may live."""
    try:
        return msgspec.json.decode(store_of(path).read(path, _NOTE_LIMIT, follow=False), type=Writer)
    except (FileNotFoundError, regular_file.NotRegular, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def notes(staging: Path) -> list[Path]:
    """Return the notes of the writers that fill a staging directory. Raises OSError."""
    try:
        return [staging / name for name in store_of(staging).names(staging) if name.startswith(NOTE)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _thread_lives(staging: Path, patience_s: float) -> bool:
    """Return whether another thread than this one fills it."""
    thread = _threads.get(staging)
    if thread is None or thread is threading.current_thread():
        return False
    thread.join(patience_s)
    return thread.is_alive()


def is_alive(writer: Writer) -> bool | None:
    """Return whether that process lives; None where it is on another machine, or in another container of this one."""
    if writer.machine != _machine():
        return None
    return _begun(writer.pid) == writer.begun


def _changes(staging: Path, stall_s: float) -> bool:
    """Return False after it has been the same for so long, as seen by this process. Raises OSError."""
    seen = look(staging)
    before, since = _watched.get(staging, (None, 0.0))
    if seen != before:
        _watched[staging] = seen, time.monotonic()
        return True
    return time.monotonic() - since < stall_s


def look(staging: Path) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and time of change in ns of each file: a change of these is a sign of life.

    A file that vanishes meanwhile is left out. Raises OSError.
    """
    store = store_of(staging)
    try:
        paths = [staging / name for name in store.names(staging)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    seen = [(path, store.look(path)) for path in paths]
    return sorted((str(path), found.size_bytes, found.changed_ns) for path, found in seen if found is not None)


@cache
def _machine() -> str:
    """Return the boot of this machine, and the namespace of its pids."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - it is no path
    return f"unknown {socket.gethostname()} {os.urandom(8).hex()}"


def _begun(pid: int) -> int | None:
    """Return a process's start time, in ticks since the boot; None where it is dead, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
