"""What a supervisor reads of the run directory and writes to it, without ever waiting for it.

The ledger is written to this machine's own disk; a killable child (``io_worker``, as the agents have one) copies it to
the run directory, and looks for the verdict. While the run directory hangs, the last reading stays.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.rundir import chain_order, directory_locks, node_directories, stale_directories
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from resilio_hpc.launch.rundir.run_directory import RunIdentity
from resilio_hpc.launch.rundir.storage import Storage

LOOK_S = 0.3
LAST_LOOK_S = 5.0
FAREWELL_S = 20.0  # time for the run directory to take the rest of the ledger


class SupervisorFiles:
    """Reads and writes the run directory. ``part``: whose end is looked for; ``writer``: the ledger's.

    Not safe for threads.
    """

    def __init__(self, run: RunIdentity, part: str, writer: str) -> None:
        self._run = run
        self._directory = node_directories.make(node_directories.local_base())
        self._held = directory_locks.AgentLocks(
            [self._directory], claim=directory_locks.claim_of(run.run_id, "", os.getpid())
        )
        self.ledger = Ledger(self._directory / "spool" / "ledger", writer)
        self.verdict: dict[str, Any] | None = None  # the part's, once it was read
        self.status: dict[str, Any] = {}  # the controller's, as last read
        self.order: ChainOrder | None = None  # the user's order about the chain
        self.last_words = self._directory / "ended.json"
        """Where an agent on this machine tells how the run ended."""
        self._storage = Storage(run.path, self._directory / "spool", part, run.run_id, f"{run.run_id}:launcher")
        self._asked_at = float("-inf")
        self._asking = False
        self._seen_at = float("-inf")  # when the last answered look had begun

    def tick(self, now: float, wait_s: float = 0.0) -> None:
        """Take answers, for ``wait_s`` at most; look again when it is due. ``now``: monotonic"""
        self._held.tick()
        if not self._asking and self.verdict is None and now >= self._asked_at + LOOK_S:
            self._ask(now)
        select.select([self._storage.fileno()], [], [], wait_s)
        self._storage.serve()

    def _ask(self, now: float) -> None:
        def answer(reply: dict[str, Any] | None) -> None:
            self._asking = False
            if reply is not None:
                self.verdict, self.status, self._seen_at = reply["ended"], reply["status"] or {}, now
                self.order = chain_order.parse(reply["order"])

        self._asked_at, self._asking = now, True
        self._storage.request("look", answer)

    @property
    def gone(self) -> bool:
        """Return whether the run directory was removed, so that no verdict will ever be seen there."""
        return self._storage.gone

    def told_verdict(self) -> dict[str, Any] | None:
        """Return the verdict that an agent reported, without its reason, for when the run directory does not answer."""
        told = trusted_files.read_object(self.last_words)
        return told if told is not None and {"verdict", "exit_code"} <= told.keys() else None

    def seen_since(self, moment: float, now: float) -> bool:
        """Return whether the run directory was read after ``moment``; if not, read it as soon as possible."""
        if self._seen_at <= moment and not self._asking:
            self._ask(now)
        return self._seen_at > moment

    def last_look(self) -> dict[str, Any] | None:
        """Look once more for the verdict, with a short wait for the answer."""
        began = now = time.monotonic()
        while self.verdict is None and not self.seen_since(began, now) and now < began + LAST_LOOK_S:
            self.tick(now, wait_s=0.05)
            now = time.monotonic()
        return self.verdict

    def show_life(self, turn: int) -> None:
        """Show other launches that the one which has ``turn`` runs, until ``close``."""
        self._storage.show_life(turn)

    def move_end(self, key: str, end_time: float | None) -> None:
        """Tell the agents of job ``key`` the new end of the job."""
        self._storage.request("move_end", job=key, end_time=end_time)

    def close(self) -> None:
        """Copy the rest of the ledger to the run directory; what it does not take stays on this machine."""
        self.ledger.close()
        if self._storage.close(FAREWELL_S):
            stale_directories.remove(self._directory)
        else:
            say(f"not all of the ledger reached {self._run.path}; the rest is in {self._directory}")
