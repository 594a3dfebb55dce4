"""Ranks whose program is over and whose processes have not ended: they save, free devices, wait for threads, or hang.

``rank_main`` records an uncaught exception first, and writes into a file beside it once nothing is left but the
process's own end. A plain script's peers wait meanwhile in a collective that this rank never enters.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.protocol.root_cause import reads_like_echo
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LINGERS_S, LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.launch.workers.output.error_file import describe_exit, read_error
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE
from resilio_hpc.launch.workers.rank_notes import exit_code
from resilio_hpc.launch.workers.rank_owner import RankEvents

FAILED_S = 30.0  # a logger may have to send its last lines; a library that hangs here hangs for good
RECENT_S = 60.0  # an error from before is one that the program has caught: it would have ended by now
LOOKS_S = 1.0


class SlowEnds:
    """The ranks of one node that take long to end."""

    def __init__(
        self, node: NodeContext, core: RankEvents, pids: Mapping[int, int], files: Mapping[int, Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Take live views of the processes and of the error files, by local rank."""
        self._node, self._core, self._pids, self._files = node, core, pids, files
        self._clock = clock
        self._since: dict[int, float] = {}  # process → when it was first seen to be at its end
        self._next = 0.0
        # where ranks start again alone, a report lets the next process begin: the last one must have ended
        self._ends_alone = node.options.reentry.restart_policy == "failed"

    def tell_of_origin(self, error: str) -> None:
        """Report living ranks with an error of their own, where another rank's ``error`` reads like an echo of one.

        Else the echo would be taken for the failure that ended the round.
        """
        local = self._core.local
        if local is None or self._ends_alone or not reads_like_echo(error):
            return
        for local_rank in sorted(self._pids):
            said, _ = read_error(self._files[local_rank]) if local_rank in self._files else (None, "")
            recent = said is not None and said.time > time.time() - RECENT_S
            if said is not None and recent and not reads_like_echo(said.message):
                self._core.ends.raised(local, local_rank, said.time, (said.message, said.traceback), NO_EVIDENCE)

    def tick(self, local: LocalRound | None) -> None:
        """Kill ranks that have failed and do not end; report those whose program has ended well."""
        now = self._clock()
        if local is None or now < self._next:
            return
        self._next = now + LOOKS_S
        self._since = {pid: since for pid, since in self._since.items() if pid in self._pids.values()}
        for local_rank, pid in list(self._pids.items()):
            code = exit_code(self._files[local_rank], pid) if local_rank in self._files else None
            rank = local.ranks[local_rank]
            if code == 0 and rank.finished_at is None:
                rank.finished_at = now
            elif code and now - self._since.setdefault(pid, now) > FAILED_S:
                self._kill(local, rank, pid, code)
        for rank in local.lingering(now):
            self._node.tell("exit_overdue", rank=rank.rank, pid=self._pids.get(rank.local_rank), waited_s=LINGERS_S)

    def _kill(self, local: LocalRound, rank: LocalRank, pid: int, code: int) -> None:
        del self._since[pid]  # a process that even SIGKILL does not end is reported again
        self._node.tell("end_forced", rank=rank.rank, pid=pid, waited_s=FAILED_S)
        if not self._ends_alone:
            said, _ = read_error(self._files[rank.local_rank])
            error = (said.message, said.traceback) if said is not None else (describe_exit(code, None), "")
            at = said.time if said is not None else time.time() - FAILED_S
            self._core.ends.raised(local, rank.local_rank, at, error, NO_EVIDENCE)
        process_tree.signal_group(pid, signal.SIGKILL)
