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
from collections.abc import Callable
from typing import NoReturn

import msgspec

from resilio_hpc.core import interpreter, process_title
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import forked_child, load_time_variables, rank_main, store_host
from resilio_hpc.launch.workers.forking.image_restore import ImageRestore
from resilio_hpc.launch.workers.forking.rank_leftovers import LOOKS_MS, RankLeftovers
from resilio_hpc.launch.workers.forking.rank_stop import RankStop
from resilio_hpc.launch.workers.forking.spawned_processes import SpawnedProcesses, SpawnedRank
from resilio_hpc.launch.workers.forking.spawner_messages import (
    MAX_BYTES,
    Command,
    ImageFailed,
    Mode,
    OpenStore,
    RankCommand,
    Ready,
    SpawnerEvent,
    SpawnFailed,
    Started,
    Stop,
    StoreDied,
    from_spawner,
    to_spawner,
)
from resilio_hpc.launch.workers.forking.stopped_agent import LOOK_S, StoppedAgent

Task = Callable[[], int | None]
"""What a forked child does once it has left the spawner's loop; its result is the exit code."""


class Options(msgspec.Struct, frozen=True):
    """Options, given on the command line as JSON.

    ``why_not_fork`` "" asks for preloading. ``cwd`` "": the present directory. ``torch`` False: neither ranks nor this
    process import torch. ``program``: kind and name of the program, as far as known. ``python_path``: the ranks'
    PYTHONPATH; this process's own is absolute. ``lost_s``: see ``StoppedAgent``.
    """

    fd: int
    agent: int
    preload: tuple[str, ...]
    why_not_fork: str
    cwd: str = ""
    torch: bool = True
    program: tuple[str, str] = ("", "")
    python_path: str | None = None
    lost_s: float = 0.0


class Zygote:
    """The spawner's loop. ``serve`` returns in forked children only, with their task."""

    def __init__(self, link: socket.socket, why_not_fork: str, torch: bool, lost_s: float = 0.0) -> None:
        self._link = link
        self._why_not_fork = why_not_fork
        self._torch = torch
        self._environment = dict(os.environ)
        self._processes = SpawnedProcesses()
        self._leftovers = RankLeftovers(self._processes)
        self._stop: RankStop | None = None
        self._backlog: deque[RankCommand | OpenStore] = deque()
        self._restores: list[ImageRestore] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._terminated = False
        self._agent = os.getppid()
        self._stopped_agent = StoppedAgent(self._agent, lost_s)

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
            task = self._next_in_backlog() if self._stop is None else None
            if task is not None:
                return task
            ready = {fd for fd, _ in poll.poll(self._timeout_ms())}
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._send(*self._processes.reap())
            self._see_restores()
            if self._terminated or (self._processes.ranks and self._stopped_agent.is_over(time.monotonic())):
                self._end()
            if self._link.fileno() in ready:
                packet = self._link.recv(MAX_BYTES)
                if not packet:
                    self._end()
                self._accept(to_spawner.decode(packet))
            if self._stop is not None:
                self._send(*self._stop.further())
                if self._stop.over:
                    self._stop = None

    def _end(self) -> NoReturn:
        """End everything, since the agent is gone."""
        self._processes.end_all()
        os._exit(0)

    def _timeout_ms(self) -> float | None:
        if self._stop is not None:
            return self._stop.looks_again_ms()
        return LOOKS_MS if self._backlog or self._restores else LOOK_S * 1000 if self._processes.ranks else None

    def _accept(self, command: Command) -> None:
        if not isinstance(command, Stop):
            self._backlog.append(command)
            return
        ended = [one for one in self._backlog if isinstance(one, RankCommand) and one.after]
        for one in ended:  # its round is over
            self._backlog.remove(one)
        self._leftovers.forget()
        while self._restores:
            self._restores.pop().end()
        self._stop = RankStop(command, self._processes, self._stop.begun if self._stop else time.monotonic())
        self._stop.signal_ranks()

    def _next_in_backlog(self) -> Task | None:
        for _ in range(len(self._backlog)):
            command = self._backlog.popleft()
            if isinstance(command, RankCommand) and command.after and self._must_wait(command):
                continue
            if isinstance(command, RankCommand) and command.image is not None:
                self._restores.append(ImageRestore(command, command.image, self._processes))
                continue
            task = self._spawn(command) if isinstance(command, RankCommand) else self._open_store(command)
            if task is not None:
                return task
        return None

    def _must_wait(self, command: RankCommand) -> bool:
        """Return whether a rank cannot start again: what its last process left running has not ended."""
        over, outlived = self._leftovers.ended(command)
        if not over:
            self._backlog.append(command)
        elif outlived:
            what = f"processes {outlived} of its last process outlived SIGKILL (stuck in the kernel?)"
            self._send(SpawnFailed(command.local_rank, what))
        return not over or bool(outlived)

    def _see_restores(self) -> None:
        """Report those that are over. Where one has failed, its rank starts without."""
        for restore in list(self._restores):
            why, command, pid = restore.look(), restore.command, restore.image.pid
            if why is None:
                continue
            self._restores.remove(restore)
            if why:
                self._send(ImageFailed(command.local_rank, pid, why, restore.seconds))
                self._backlog.append(msgspec.structs.replace(command, image=None))
            else:
                self._processes.ranks[pid] = SpawnedRank(command.local_rank, "image", command.kind)
                self._send(Started(command.local_rank, pid, time.time(), "image", ""))

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
            forked_child.detach(self._processes.spawner, (self._link.detach(), self._wake_read, self._wake_write))
            return lambda: forked_child.become_rank(command, stdout, stderr, program)
        for fd in {stdout, stderr}:
            os.close(fd)
        if pid < 0:
            return None
        mode: Mode = "exec" if why else "fork"
        self._processes.ranks[pid] = SpawnedRank(command.local_rank, mode, command.kind)
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
        self._processes.end_stores(command.round - 1)
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
        self._processes.stores[pid] = command.round
        return None

    def _become_store(self, command: OpenStore) -> int:
        forked_child.detach(self._processes.spawner, (self._wake_read, self._wake_write))
        if self._why_not_fork:
            self._execute_store(command)
        return store_host.hold(self._link, command.round, command.host)

    def _execute_store(self, command: OpenStore) -> NoReturn:
        os.set_inheritable(self._link.fileno(), True)
        argv = [sys.executable, "-c", interpreter.source("launch.workers.forking.store_host")]
        argv += map(str, (self._link.fileno(), self._processes.spawner, command.round, command.host))
        os.execv(sys.executable, argv)

    def _send(self, *events: SpawnerEvent) -> None:
        try:
            for event in events:
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
    zygote = Zygote(link, options.why_not_fork, options.torch, options.lost_s)
    task = zygote.serve()
    del zygote, link
    sys.exit(task())


def _preload(options: Options) -> Options:
    """Import what ranks need. If the process must not fork after that, start it again without the imports."""
    from resilio_hpc.launch.workers.forking import preload

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
