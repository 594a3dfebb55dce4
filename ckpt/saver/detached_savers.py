"""Savers that outlive the process that asked them, without a launcher, and how a restarted run handles them.

While the committing one works alone, a file ``.orphan-<session>`` in the checkpoint directory shows it. A process that
restores, or writes, waits until it is gone: then all processes of the new run see the same steps. Where nothing changes
any more, the saver was killed, or hangs: its staged files are moved away, so that it can commit nothing later.

No file is locked and no clocks are compared: shared file systems, and nodes, would not always agree.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.ckpt.store import writers
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.staging import give_up, staged
from resilio_hpc.core import standard_streams

STALL_S = 30.0
"""An NFS client may show a file of another node as it was so long ago."""
_POLL_S = 0.05
_MARK = re.compile(r"\.orphan-([0-9a-f]{1,32})")


class Progress:
    """The progress of what a session has staged, as far as it is visible here."""

    def __init__(self, directory: Path, session: str) -> None:
        self._directory = directory
        self._session = session
        self._seen: list[tuple[str, int, int]] = []
        self._changed = time.monotonic()

    def idle_s(self) -> float:
        """Return for how many seconds nothing has changed."""
        now, seen = time.monotonic(), self._look()
        if seen != self._seen:
            self._seen, self._changed = seen, now
        return now - self._changed

    def _look(self) -> list[tuple[str, int, int]]:
        seen = []
        with contextlib.suppress(OSError):
            for staging in staged(self._directory, self._session):
                seen += writers.look(staging)
        return sorted(seen)


@contextmanager
def marked(directory: Path, session: str) -> Iterator[None]:
    """Mark, for the time of the block, that the save of a dead process is being finished.

    Raises nothing itself.
    """
    store, mark = store_of(directory), _mark(directory, session)
    with contextlib.suppress(OSError):
        store.make_directory(directory)
        store.create(mark)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            store.remove(mark)


def is_marked(directory: Path, session: str) -> bool:
    """Return whether the mark stands. False: a new run has stopped waiting, so nothing may be committed."""
    return store_of(directory).exists(_mark(directory, session))


def wait_for_orphans(directory: Path, session: str = "", say: bool = False, stall_s: float = STALL_S) -> None:
    """Wait until no orphan of another session than ``session`` can commit any more.

    ``say``: tells the user. ``stall_s``: an orphan that changes nothing for so long, in seconds, is given up. Raises
    nothing: what cannot be seen or moved away is not waited for.
    """
    with contextlib.suppress(OSError):
        for name in sorted(store_of(directory).names(directory, steps=False)):
            found = _MARK.fullmatch(name)
            if found and found[1] != session:
                _wait_for(directory, directory / name, found[1], say, stall_s)


def _mark(directory: Path, session: str) -> Path:
    return directory / f".orphan-{session}"


def _wait_for(directory: Path, mark: Path, session: str, say: bool, stall_s: float) -> None:
    if say:
        standard_streams.say(f"a killed run's last save is still being written to {directory}: waiting")
    progress = Progress(directory, session)
    while store_of(mark).exists(mark):
        if progress.idle_s() > stall_s:
            give_up(directory, session)
            store_of(mark).remove(mark, ignore_errors=False)
            return
        time.sleep(_POLL_S)
