"""The spawner process: starts ranks, by a fork of an interpreter that has imported torch, or by executing them.

It is single-threaded, and woken by its command socket and by SIGCHLD, never by a timer while nothing is being stopped.
It is a child subreaper, so whatever its ranks leave behind becomes its child. It ends everything below it and then
itself when the agent is gone (end of file, or the SIGTERM that the kernel sends it).
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from resilio_hpc.core import interpreter, process_title
from resilio_hpc.launch.process import process_tree, shared_memory
from resilio_hpc.launch.workers import forked_child, load_time_variables, rank_main, store_host
from resilio_hpc.launch.workers.spawner_messages import (
    MAX_BYTES,
    AllStopped,
    Command,
    Exited,
    Kind,
    Mode,
    OpenStore,
    RankCommand,
    Ready,
    SpawnerEvent,
    SpawnFailed,
    Started,
    Stop,
    StopFailed,
    StoreDied,
    from_spawner,
    to_spawner,
)

Task = Callable[[], int | None]
"""What a forked child does once it has left the spawner's loop; its result is the exit code."""


class Options(msgspec.Struct, frozen=True):
    """Options, given on the command line as JSON.

    ``why_not_fork`` "" asks for preloading. ``cwd`` "": the present directory. ``torch`` False: neither ranks nor this
    process import torch. ``program``: kind and name of the program, as far as known. ``python_path``: the ranks'
    PYTHONPATH; this process's own is absolute.
    """

    fd: int
    agent: int
    preload: tuple[str, ...]
    why_not_fork: str
    cwd: str = ""
    torch: bool = True
    program: tuple[str, str] = ("", "")
    python_path: str | None = None


@dataclass(frozen=True)
class _Rank:
    local_rank: int
    mode: Mode
    kind: Kind


@dataclass
class _Stopping:
    command: Stop
    begun: float
    heeding: set[int] = field(default_factory=set)  # with heeded_only: processes whose own ends are awaited
    killed_at: float | None = None
    segments: set[Path] = field(default_factory=set)  # segments of shared memory that may be left
    reported: bool = False

    def deadline(self) -> float:
        grace = self.begun + self.command.grace_s
        return grace if self.killed_at is None else grace + self.command.kill_timeout_s


class Zygote:
    """The spawner's loop. ``serve`` returns in forked children only, with their task."""

    def __init__(self, link: socket.socket, why_not_fork: str, torch: bool) -> None:
        self._link = link
        self._why_not_fork = why_not_fork
        self._torch = torch
        self._environment = dict(os.environ)
        self._ranks: dict[int, _Rank] = {}
        self._stores: dict[int, int] = {}  # pid → round
        self._stopping: _Stopping | None = None
        self._backlog: deque[RankCommand | OpenStore] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pid = os.getpid()
        self._began = time.time()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._terminated = False
        self._agent = os.getppid()

    def _on_terminate(self, *_: object) -> None:
        """Handle SIGTERM: the agent died and the kernel sent it, or Slurm sent it to the whole step.

        The agent handles that of Slurm.
        """
        self._terminated = os.getppid() != self._agent

    def serve(self) -> Task:
        """Carry out commands until the agent is gone. Return the task, in a forked child."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            task = self._next_in_backlog() if self._stopping is None else None
            if task is not None:
                return task
            ready = {fd for fd, _ in poll.poll(self._timeout_ms())}
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._reap()
            if self._terminated:
                self._end()
            if self._link.fileno() in ready:
                packet = self._link.recv(MAX_BYTES)
                if not packet:
                    self._end()
                self._accept(to_spawner.decode(packet))
            if self._stopping is not None:
                self._stop_further(self._stopping)

    def _end(self) -> None:
        """End everything, since the agent is gone. Trackers are left alone: they end when they have cleaned up."""
        below = process_tree.descendants(self._pid)
        segments = shared_memory.held(below, self._began)
        trackers = frozenset(filter(process_tree.is_tracker, below))
        process_tree.kill_descendants(self._pid, trackers)
        if segments:
            process_tree.wait_for_ends(below, process_tree.TRACKERS_S)
            shared_memory.remove(segments)
        os._exit(0)

    def _timeout_ms(self) -> float | None:
        if self._backlog and self._stopping is None:
            return 0
        if self._stopping is None or (self._stopping.killed_at is not None and self._stopping.reported):
            return None
        left = max(0.0, (self._stopping.deadline() - time.monotonic()) * 1000)
        looks_again = self._stopping.killed_at is not None or self._stopping.heeding or self._stopping.command.spare
        return min(left, 20.0) if looks_again else left

    def _accept(self, command: Command) -> None:
        if not isinstance(command, Stop):
            self._backlog.append(command)
            return
        self._stopping = _Stopping(command, self._stopping.begun if self._stopping else time.monotonic())
        if command.grace_s > 0 and not command.spare:
            if command.heeded_only:
                self._stopping.heeding = {pid for pid in self._hearing() if process_tree.handles(pid, command.signal)}
            for pid in self._ranks:
                process_tree.signal_group(pid, command.signal)
                process_tree.signal_group(pid, signal.SIGCONT)  # a stopped rank cannot act on the first signal

    def _hearing(self) -> Iterator[int]:
        """Yield ranks that handle the signal; of a command also its children, since a shell passes no signal on."""
        for pid, rank in self._ranks.items():
            yield pid
            if rank.kind == "command":
                yield from process_tree.descendants(pid)

    def _next_in_backlog(self) -> Task | None:
        while self._backlog:
            command = self._backlog.popleft()
            task = self._spawn(command) if isinstance(command, RankCommand) else self._open_store(command)
            if task is not None:
                return task
        return None

    # -- starting ------------------------------------------------------------------------------------------------

    def _spawn(self, command: RankCommand) -> Task | None:
        why = self._why_exec(command)
        try:
            program = forked_child.program(command, self._environment) if why else ()
            forked_child.check_directory(command.cwd)
            stdout, stderr = forked_child.open_outputs(command)
        except OSError as error:
            self._send(SpawnFailed(command.local_rank, f"{error.filename}: {error.strerror}"))
            return None
        try:
            pid = forked_child.fork()
        except OSError as error:
            pid = -1
            self._send(SpawnFailed(command.local_rank, f"cannot fork: {error.strerror} (limits on processes, memory?)"))
        if pid == 0:
            forked_child.detach(self._pid, (self._link.detach(), self._wake_read, self._wake_write))
            return lambda: forked_child.become_rank(command, stdout, stderr, program)
        for fd in {stdout, stderr}:
            os.close(fd)
        if pid < 0:
            return None
        mode: Mode = "exec" if why else "fork"
        self._ranks[pid] = _Rank(command.local_rank, mode, command.kind)
        self._send(Started(command.local_rank, pid, time.time(), mode, why))
        return None

    def _why_exec(self, command: RankCommand) -> str:
        if command.kind == "command":
            return "not a Python script"
        if self._why_not_fork:
            return self._why_not_fork
        names = load_time_variables.differing(self._environment, command.env)
        return f"{', '.join(names)} can only be set for a new process" if names else ""

    def _open_store(self, command: OpenStore) -> Task | None:
        self._end_stores(command.round - 1)
        if not self._torch:
            self._send(store_host.free_port(command.round, command.host))
            return None
        try:
            pid = forked_child.fork()
        except OSError as error:
            self._send(StoreDied(command.round, f"cannot fork: {error.strerror}"))
            return None
        if pid == 0:
            return lambda: self._become_store(command)
        self._stores[pid] = command.round
        return None

    def _become_store(self, command: OpenStore) -> int:
        forked_child.detach(self._pid, (self._wake_read, self._wake_write))
        if self._why_not_fork:
            self._execute_store(command)
        return store_host.hold(self._link, command.round, command.host)

    def _execute_store(self, command: OpenStore) -> NoReturn:
        os.set_inheritable(self._link.fileno(), True)
        arguments = map(str, (self._link.fileno(), self._pid, command.round, command.host))
        os.execv(sys.executable, [sys.executable, "-c", interpreter.source("launch.workers.store_host"), *arguments])

    # -- ending --------------------------------------------------------------------------------------------------

    def _end_stores(self, first_kept: int) -> None:
        ended = [pid for pid, round in self._stores.items() if round < first_kept]
        for pid in ended:
            del self._stores[pid]  # so that its end is not reported
        process_tree.send(ended, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                exit_code, number = (code, None) if code >= 0 else (None, -code)
                self._send(Exited(rank.local_rank, pid, exit_code, number, time.time(), rank.mode))
            elif pid in self._stores:
                end = f"exit code {code}" if code >= 0 else f"signal {-code}"
                self._send(StoreDied(self._stores.pop(pid), f"the store's process ended: {end}"))

    def _stop_further(self, stopping: _Stopping) -> None:
        """Kill when the ranks are gone or the grace is over; report when no rank is left."""
        now = time.monotonic()
        if stopping.killed_at is None and self._waits(stopping, now):
            return
        first_kept = stopping.command.keep_stores_from
        self._end_stores(max(self._stores.values(), default=0) + 1 if first_kept is None else first_kept)
        if stopping.killed_at is None:
            stopping.killed_at = now
        if stopping.command.spare:
            self._reap()
            self._all_stopped(stopping)
            return
        left = self._kill(stopping, now)
        self._reap()
        if not set(process_tree.children(self._pid)) - set(self._stores):
            shared_memory.remove(stopping.segments)
            self._all_stopped(stopping)
        elif not stopping.reported and now >= stopping.deadline():
            stopping.reported = True
            self._send(StopFailed(tuple(left), now - stopping.begun))

    def _waits(self, stopping: _Stopping, now: float) -> bool:
        """Return whether a process should end by itself before anything is killed."""
        if stopping.command.spare:
            stopping.heeding |= set(self._stores)  # the stores were not left by ranks
            self._end_stores(1 << 30)
            left = process_tree.children(self._pid)
            ours = any(pid in stopping.heeding or process_tree.is_tracker(pid) for pid in left)
            return bool(left) and now < stopping.deadline() + (process_tree.TRACKERS_S if ours else 0.0)
        if now >= stopping.deadline():
            return False
        if stopping.command.heeded_only:
            stopping.heeding = {pid for pid in stopping.heeding if process_tree.runs(pid)}
            return bool(stopping.heeding)
        return bool(self._ranks)

    def _kill(self, stopping: _Stopping, now: float) -> list[int]:
        """Kill everything but the stores; trackers get time to clean up after the others. Return what is left."""
        below = [pid for pid in process_tree.descendants(self._pid) if pid not in self._stores]
        stopping.segments |= shared_memory.held(below, self._began)
        assert stopping.killed_at is not None
        spared = set(self._stores)
        if now < stopping.killed_at + process_tree.TRACKERS_S:
            spared |= set(filter(process_tree.is_tracker, below))
        return process_tree.kill_descendants(self._pid, frozenset(spared))

    def _all_stopped(self, stopping: _Stopping) -> None:
        self._send(AllStopped(time.monotonic() - stopping.begun))
        self._stopping = None

    def _send(self, event: SpawnerEvent) -> None:
        try:
            self._link.send(from_spawner.encode(event))
        except (BrokenPipeError, ConnectionError):
            self._end()


def main() -> None:
    """Entry point; ``sys.argv[1]`` holds the options."""
    begun = time.monotonic()
    options = msgspec.json.decode(sys.argv[1], type=Options)
    process_tree.die_with_parent(options.agent, signal.SIGKILL)  # there is nothing to clean up, and an import may hang
    process_tree.become_subreaper()
    process_title.show("zygote", os.environ.get(process_tree.TOKEN_VARIABLE, ""))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_tree.outlive_warnings()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # during the imports; then see _on_terminate
    os.set_inheritable(options.fd, False)
    forked_child.enter(options.cwd)
    if options.python_path is not None:
        os.environ["PYTHONPATH"] = options.python_path
    if not options.why_not_fork:
        options = _preload(options)
    process_tree.die_with_parent(options.agent, signal.SIGTERM)
    link = socket.socket(fileno=options.fd)
    link.send(from_spawner.encode(Ready(os.getpid(), time.monotonic() - begun, 1, options.why_not_fork)))
    zygote = Zygote(link, options.why_not_fork, options.torch)
    task = zygote.serve()
    del zygote, link
    sys.exit(task())


def _preload(options: Options) -> Options:
    """Import what ranks need. If the process must not fork after that, start it again without the imports."""
    from resilio_hpc.launch.workers import preload

    environment = dict(os.environ)
    kind, name = options.program
    place = rank_main.own_place(kind, name) if name else ""
    why = preload.why_not_load(kind, name, place, options.preload, options.torch)
    if why:
        return msgspec.structs.replace(options, why_not_fork=why)
    why = preload.import_all(options.preload, options.torch, place) or preload.why_not_fork(place)
    if why:
        process_tree.kill_descendants(os.getpid())  # processes that a preloaded module may have started
        os.set_inheritable(options.fd, True)
        again = msgspec.json.encode(msgspec.structs.replace(options, preload=(), why_not_fork=why)).decode()
        os.execve(sys.executable, [*sys.orig_argv[:-1], again], environment)
    del environment
    gc.collect()
    gc.freeze()
    return options
