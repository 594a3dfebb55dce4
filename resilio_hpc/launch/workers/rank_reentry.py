"""Ranks that live on between two rounds: which processes are kept, and which of them enter the next round."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection

from resilio_hpc.core import rank_link
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import load_time_variables
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand, Started
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_server import RankServer

_OF_A_PROCESS = (
    "LOCAL_RANK", "RESILIO_LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK", "OMP_NUM_THREADS",
)  # fmt: skip
"""Variables that are read once in the life of a process; so are those of ``load_time_variables``."""


class RankReentry:
    """The processes of one node's ranks, from round to round. ``pids``: by local rank, of all that run.

    ``end``: ends a process and its descendants. ``standby``: a process that can take a rank's place, 0: none.
    """

    def __init__(
        self, server: RankServer, pids: dict[int, int], end: Callable[[int], None] | None = None,
        standby: Callable[[RankCommand], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        self._server = server
        self._pids = pids
        self._standby = standby
        self._end = end or _end
        self._commands: dict[int, RankCommand] = {}
        self._kept: dict[int, int] = {}
        self._ended: set[int] = set()  # kept for a round that they could not enter

    def keep(self, local_ranks: Collection[int]) -> tuple[int, ...]:
        """Keep the processes of these ranks. Return their pids."""
        self._kept = {local: self._pids[local] for local in local_ranks if local in self._pids}
        return tuple(self._kept.values())

    def others_ended(self) -> None:
        """Take note that no other processes are left."""
        for local in set(self._pids) - set(self._kept):
            del self._pids[local]

    def enter(self, command: RankCommand) -> bool:
        """Have a rank enter the next round in its process. Return False where it needs another one."""
        local, before = command.local_rank, self._commands.get(command.local_rank)
        self._commands[local] = command
        pid = self._kept.get(local)
        if pid is None or before is None or self._pids.get(local) != pid or not _may_go_on(before, command):
            return self._enter_standby(command)
        if not self._tell(pid, command):
            return False
        del self._kept[local]
        return True

    def _enter_standby(self, command: RankCommand) -> bool:
        """Have a process that waits for a place take the rank's. Return whether there is one."""
        pid = self._standby(command)
        if not pid:
            return False
        if not self._tell(pid, command):
            self._ended.add(pid)
            self._end(pid)
            return False
        self._end_kept(command.local_rank)
        self._pids[command.local_rank] = pid
        return True

    def started(self, event: Started, local: LocalRound | None) -> None:
        """Have a process that was restored from an image take the rank's place, or end it: then the rank has failed."""
        if event.mode != "image" or local is None:
            return
        local.ranks[event.local_rank].is_kept = True
        if not self._tell(event.pid, self._commands[event.local_rank]):
            process_tree.stop_and_kill(event.pid)

    def _tell(self, pid: int, command: RankCommand) -> bool:
        message = rank_link.EnterRound(command.env, command.stdout_path, command.stderr_path)
        return self._server.tell_process(pid, message)

    def end_others(self) -> None:
        """End the kept processes that do not enter the round."""
        for local in list(self._kept):
            self._end_kept(local)

    def _end_kept(self, local: int) -> None:
        """End the kept process of a rank, if there is one: it does not enter the round."""
        pid = self._kept.pop(local, None)
        if pid is not None and self._pids.get(local) == pid:
            del self._pids[local]
            self._ended.add(pid)
            self._end(pid)

    def was_ended(self, pid: int) -> bool:
        """Return whether this process was ended here: its end is no failure of the rank that has its place."""
        found = pid in self._ended
        self._ended.discard(pid)
        return found


def _end(pid: int) -> None:
    process_tree.send([*process_tree.descendants(pid), pid], signal.SIGKILL)


def _may_go_on(before: RankCommand, after: RankCommand) -> bool:
    """Return whether a rank that was started by the one command can go on by the other.

    Where there is nothing to restore, training begins again, and what this process has trained must not be there.
    """
    return before.cpus == after.cpus and bool(after.env.get("RESILIO_RESTORE")) and may_follow(before, after)


def may_follow(before: RankCommand, after: RankCommand, but: tuple[str, ...] = ()) -> bool:
    """Return whether a process of the one command can be that of the other. ``but``: variables that may differ."""
    same = (before.argv, before.kind, before.cwd, before.open_files, before.stdin_path) == (
        after.argv, after.kind, after.cwd, after.open_files, after.stdin_path
    )  # fmt: skip
    names = [name for name in _OF_A_PROCESS if name not in but]
    return (
        same
        and not load_time_variables.differing(before.env, after.env)
        and all(before.env.get(name) == after.env.get(name) for name in names)
    )
