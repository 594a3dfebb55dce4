"""The agent's end of the links to the tasks of an MPI step on its node.

A task waits here until the agent knows its round; a task of a round that is over is refused. Tasks are children of
slurmstepd, so pidfds show their ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from resilio_hpc.core.errors import WireError
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.mpi import messages as mm

STEP_KILLED = 128 + signal.SIGKILL  # the exit code reported for a rank whose task was killed, since its own is unknown
MAX_CONNECTIONS = 4096


class Task(Struct):
    """One connection. ``exits``: pidfds of the task and, once it runs, of its rank."""

    socket: socket.socket
    pid: int
    exits: list[int]
    present: mm.Present | None = None
    local_rank: int = -1
    rank_pid: int = -1
    over: bool = False  # the rank's end was reported, or it was never started


class MpiTasks:
    """``expect`` a round, ``give`` its ranks; ``serve`` returns the events that a spawner would return."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.dropped = 0
        self._round = -1
        self._first_rank = self._count = 0
        self._over = -1  # the last round whose tasks are refused
        self._commands: dict[int, sm.RankCommand] = {}
        self._tasks: dict[int, Task] = {}
        self._dying: list[int] = []  # pidfds of killed processes that have not ended yet
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(512)
        self._listener.setblocking(False)

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll for input."""
        yield self._listener.fileno()
        yield from self._tasks
        yield from self._dying

    # -- what the agent wants ----------------------------------------------------------------------------------

    def expect(self, round_number: int, first_rank: int, count: int) -> None:
        """Expect the tasks of a round from now on; this node's are ``first_rank`` and ``count`` - 1 more."""
        self._round, self._first_rank, self._count = round_number, first_rank, count
        self._over = round_number - 1
        self._commands.clear()

    def give(self, command: sm.RankCommand) -> list[sm.SpawnerEvent]:
        """Keep the command of a local rank for its task; return its events."""
        self._commands[command.local_rank] = command
        return [event for task in list(self._tasks.values()) for event in self._answer(task)]

    def started(self) -> bool:
        """Return whether every rank that was given runs or has run."""
        return not self._commands

    def running(self) -> list[int]:
        """Return the pids of the ranks that run."""
        return [task.rank_pid for task in self._tasks.values() if task.rank_pid > 0 and not task.over]

    def refuse(self) -> None:
        """Refuse tasks that still come for the round, which is over."""
        self._over = max(self._over, self._round)
        self._commands.clear()
        for task in list(self._tasks.values()):
            self._answer(task)

    def kill(self) -> None:
        """SIGKILL every task, its rank and all of their descendants."""
        self.refuse()
        for task in list(self._tasks.values()):
            trackers = filter(process_tree.is_tracker, process_tree.descendants(task.pid))
            process_tree.kill_descendants(task.pid, frozenset(trackers))
            if task.rank_pid > 0 and not task.over:
                process_tree.signal_group(task.rank_pid, signal.SIGKILL)
            self._close(task, kill=True)

    def left(self) -> bool:
        """Return whether a process that was killed has not ended yet."""
        poll = select.poll()
        for fd in self._dying:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            self._dying.remove(fd)
            os.close(fd)
        return bool(self._dying)

    def close(self) -> None:
        """Kill what runs, remove the socket."""
        self.kill()
        for fd in self._dying:
            os.close(fd)
        self._dying.clear()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    # -- what tasks say ----------------------------------------------------------------------------------------

    def serve(self) -> list[sm.SpawnerEvent]:
        """Take what has arrived, without blocking."""
        self._accept()
        return [event for task in list(self._tasks.values()) for event in self._read(task)]

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            try:
                if uid not in (os.geteuid(), 0) or len(self._tasks) >= MAX_CONNECTIONS:
                    raise OSError("refused")
                exits = [os.pidfd_open(pid)]
            except OSError:
                self.dropped += 1
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * sm.MAX_BYTES)
            self._tasks[accepted.fileno()] = Task(accepted, pid, exits)

    def _read(self, task: Task) -> list[sm.SpawnerEvent]:
        events: list[sm.SpawnerEvent] = []
        while task.socket.fileno() in self._tasks:
            try:
                packet = task.socket.recv(sm.MAX_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                events += self._lost(task)
                break
            try:
                events += self._said(task, mm.to_agent.decode(packet))
            except (WireError, OSError):
                self.dropped += 1
                events += self._lost(task)
        return events

    def _said(self, task: Task, message: mm.ToAgent) -> list[sm.SpawnerEvent]:
        if isinstance(message, mm.Present):
            task.present = message
            return self._answer(task)
        if message.local_rank != task.local_rank:
            raise WireError(f"a task speaks for local rank {message.local_rank}, not for its own")
        if isinstance(message, sm.Started):
            task.rank_pid = message.pid
            try:
                task.exits.append(os.pidfd_open(message.pid))
            except OSError:
                pass  # it has ended already, as the next message shows
        else:
            task.over = True
        return [message]

    def _answer(self, task: Task) -> list[sm.SpawnerEvent]:
        """Give a waiting task its command, or refuse it."""
        present = task.present
        if present is None or task.local_rank >= 0:
            return []
        if present.round <= self._over:
            self._send_away(task, f"round {present.round} is over")
            return []
        if present.round != self._round:
            return []  # its round has not begun on this node
        local_rank = present.task - self._first_rank
        if not 0 <= local_rank < self._count:
            last = self._first_rank + self._count - 1
            self._send_away(task, f"task {present.task} is none of this node's")
            return [sm.SpawnFailed(0, f"srun put task {present.task} here, where {self._first_rank} to {last} belong")]
        command = self._commands.pop(local_rank, None)
        if command is None:
            return []
        task.local_rank = local_rank
        try:
            task.socket.send(mm.to_task.encode(command))
        except OSError:
            return self._lost(task)
        return []

    def _send_away(self, task: Task, reason: str) -> None:
        try:
            task.socket.send(mm.to_task.encode(mm.NotWanted(reason)))
        except OSError:
            pass
        self._close(task)

    def _lost(self, task: Task) -> list[sm.SpawnerEvent]:
        """Handle the end of a task's connection.

        A task that did not report how its rank ended was killed, and its rank with it.
        """
        ended = task.local_rank < 0 or task.over
        self._close(task, kill=not ended)
        if ended:
            return []
        if task.rank_pid < 0:
            return [sm.SpawnFailed(task.local_rank, "the MPI task was killed before it could start the rank")]
        process_tree.signal_group(task.rank_pid, signal.SIGKILL)
        return [sm.Exited(task.local_rank, task.rank_pid, STEP_KILLED, None, time.time(), "mpi")]

    def _close(self, task: Task, kill: bool = False) -> None:
        self._tasks.pop(task.socket.fileno(), None)
        task.socket.close()
        if not kill:
            for fd in task.exits:
                os.close(fd)
            return
        for fd in task.exits:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except OSError:
                pass  # it has ended
        self._dying += task.exits
