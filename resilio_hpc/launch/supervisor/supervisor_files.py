"""What a supervisor sees of the run directory and writes to it, without ever waiting for it.

The ledger is written to this machine's own disk; a killable child (``io_worker``, as the agents have one) copies it to
the run directory, and looks for the verdict. While the run directory hangs, what was seen last stays what is known.
"""

from __future__ import annotations

import select
import time
from typing import Any

from resilio_hpc.core import trusted_files
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.rundir import chain_order, node_directories, stale_directories
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from resilio_hpc.launch.rundir.io_worker import Storage
from resilio_hpc.launch.rundir.run_directory import RunIdentity

LOOK_S = 0.3
LAST_LOOK_S = 5.0
FAREWELL_S = 20.0  # for the run directory to take what is left of the ledger


class SupervisorFiles:
    """``part``: the part of the run whose end is looked for; ``writer``: the ledger's. Not safe for threads."""

    def __init__(self, run: RunIdentity, part: str, writer: str) -> None:
        self._run = run
        self._directory = node_directories.make(node_directories.local_base())
        self._held = stale_directories.AgentLocks([self._directory])
        self.ledger = Ledger(self._directory / "spool" / "ledger", writer)
        self.verdict: dict[str, Any] | None = None  # the part's, once it was seen
        self.status: dict[str, Any] = {}  # the controller's, as last seen
        self.order: ChainOrder | None = None  # what its user has ordered of the chain
        self.last_words = self._directory / "ended.json"
        """Where an agent on this machine tells how the run ended."""
        self._storage = Storage(run.path, self._directory / "spool", part, run.run_id)
        self._asked_at = float("-inf")
        self._asking = False
        self._seen_at = float("-inf")  # when the last look that was answered had begun

    def tick(self, now: float, wait_s: float = 0.0) -> None:
        """Take the answers that are there, or come within ``wait_s``; look again when it is time. ``now``: monotonic"""
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
        """The run directory was removed: no verdict will ever be seen there."""
        return self._storage.gone

    def told_verdict(self) -> dict[str, Any] | None:
        """Return what an agent has told of the end, for when the run directory cannot; its reason is not known."""
        told = trusted_files.read_object(self.last_words)
        return told if told is not None and {"verdict", "exit_code"} <= told.keys() else None

    def seen_since(self, moment: float, now: float) -> bool:
        """Whether the run directory was looked at after ``moment``; if not, it is looked at as soon as may be."""
        if self._seen_at <= moment and not self._asking:
            self._ask(now)
        return self._seen_at > moment

    def last_look(self) -> dict[str, Any] | None:
        """Look once more for the verdict; wait a little for the answer."""
        began = now = time.monotonic()
        while self.verdict is None and not self.seen_since(began, now) and now < began + LAST_LOOK_S:
            self.tick(now, wait_s=0.05)
            now = time.monotonic()
        return self.verdict

    def show_life(self, turn: int) -> None:
        """Let others see that the launch which has ``turn`` lives, until ``close``."""
        self._storage.show_life(turn)

    def move_end(self, key: str, end_time: float | None) -> None:
        """Tell the agents of job ``key`` that its end has changed."""
        self._storage.request("move_end", job=key, end_time=end_time)

    def close(self) -> None:
        """Let the run directory have the rest of the ledger; what it does not take stays on this machine."""
        self.ledger.close()
        if self._storage.close(FAREWELL_S):
            stale_directories.remove(self._directory)
        else:
            say(f"not all of the ledger reached {self._run.path}; the rest is in {self._directory}")
