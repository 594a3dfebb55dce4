"""The agent's side of the spawner process: start it, tell it what to start, hear what happened.

    spawner = Spawner(environment, preload=(), use_zygote=True, directory=Path("/dev/shm/run"))
    spawner.start()                                   # from the agent's main thread; returns at once
    spawner.spawn(RankCommand(0, ("train.py",), "script", {"RANK": "0"}, "/home/me", "out.log", "err.log"))
    poll.register(spawner.fileno(), select.POLLIN)    # then, whenever it is readable:
    for event in spawner.events(): ...                # Ready, Started, Exited, …, SpawnerDied

Nothing here blocks on the spawner process, whatever state that is in.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.core import interpreter
from resilio_hpc.core.errors import LaunchError
from resilio_hpc.launch.config import slurm_variables
from resilio_hpc.launch.process import process_tree, shared_memory
from resilio_hpc.launch.workers.forking.spawner_messages import (
    MAX_BYTES,
    AllStopped,
    Command,
    Exited,
    OpenStore,
    RankCommand,
    Ready,
    SpawnerDied,
    SpawnerEvent,
    SpawnFailed,
    Started,
    Stop,
    StopFailed,
    StoreDied,
    StoreReady,
    from_spawner,
    to_spawner,
)
from resilio_hpc.launch.workers.forking.zygote import Options

__all__ = [
    "AllStopped",
    "Exited",
    "RankCommand",
    "Ready",
    "SpawnFailed",
    "Spawner",
    "SpawnerDied",
    "SpawnerEvent",
    "Started",
    "StopFailed",
    "StoreDied",
    "StoreReady",
]

RESOLVER_OPTIONS = "timeout:1 attempts:5"
"""resolv.conf(5), for RES_OPTIONS. torch looks up the name of every rendezvous connection's peer; with the resolver's
defaults one lost packet holds all ranks for 5 s (seen in 2 of 120 starts of four ranks, and in none of 250 so)."""
_NO_ZYGOTE = "the zygote is switched off"


class Spawner:
    """One spawner process. Not safe for threads; after SpawnerDied it may be started again.

    ``environment`` is the ranks' final one (LD_PRELOAD, thread counts, allocator settings, affinity by inheritance);
    a ``RESILIO_TREE_TOKEN`` in it marks the whole process tree, otherwise one is drawn (see ``token``); RES_OPTIONS is
    set where it is not (see RESOLVER_OPTIONS). ``cwd``: where ranks will start, if not here. ``torch`` False: nothing
    of torch is imported, and a round's store is a free port for rank 0. ``program``: kind and name of what all ranks
    run, so that the process can tell whether it may load torch for them. The process's own output goes to
    ``directory``/spawner.log.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        preload: Sequence[str] = (),
        use_zygote: bool = True,
        directory: Path = Path(),
        kill_timeout_s: float = 5.0,
        cwd: str = "",
        torch: bool = True,
        program: tuple[str, str] = ("", ""),
        lost_s: float = 0.0,
    ) -> None:
        self._environment = dict(environment)
        self.token = self._environment.setdefault(process_tree.TOKEN_VARIABLE, secrets.token_hex(16))
        self._environment.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)
        self._preload = tuple(preload)
        self._use_zygote = use_zygote
        self._directory = directory
        self._kill_timeout_s = kill_timeout_s
        self._cwd = cwd
        self._torch = torch
        self._program = program
        self._lost_s = lost_s
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._orphans: list[int] = []
        self._began = 0.0

    @staticmethod
    def become_subreaper() -> None:
        """Let this process (the agent), instead of init, adopt what a killed spawner leaves behind."""
        process_tree.become_subreaper()

    def start(self) -> None:
        """Start the process; Ready follows. Commands may be given at once.

        Call it from the main thread: the process is told to end when the calling thread ends.
        """
        if self._process is not None:
            raise LaunchError("the spawner runs already; wait for SpawnerDied or call kill() before starting it again")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)
        ours.setblocking(False)
        why = "" if self._use_zygote else _NO_ZYGOTE
        python_path = self._environment.get("PYTHONPATH")
        environment = self._environment
        if python_path:  # the process starts in the agent's directory
            absolute = slurm_variables.absolute_path_list(python_path, self._cwd or os.getcwd())  # noqa: PTH109
            # last: it is replaced later, and modules that set titles need the first variable where the kernel put it
            others = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
            environment = {**others, "PYTHONPATH": absolute}
        options = Options(
            theirs.fileno(), os.getpid(), self._preload, why, self._cwd, self._torch, self._program, python_path,
            self._lost_s,
        )  # fmt: skip
        self._began = time.time()
        self._directory.mkdir(parents=True, exist_ok=True)
        with theirs, (self._directory / "spawner.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    interpreter.source("launch.workers.forking.zygote"),
                    msgspec.json.encode(options).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._link = ours

    @property
    def pid(self) -> int | None:
        """Return the pid of the spawner process; None before start and after its death was reported."""
        return None if self._process is None else self._process.pid

    def fileno(self) -> int:
        """Return the descriptor to poll: readable when events() has something to return.

        A new one after each start().
        """
        return self._running().fileno()

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll; none where it does not run."""
        if self._link is not None:
            yield self._link.fileno()

    def spawn(self, command: RankCommand) -> None:
        """Start a rank → Started, then Exited; or SpawnFailed. During a stop it waits for AllStopped."""
        self._send(command)

    def open_store(self, round: int, host: str) -> None:
        """Open the rendezvous store of ``round`` → StoreReady or StoreDied. May be called ahead of the round.

        Stores of rounds before ``round - 1`` end. ``host`` is the name under which the ranks will reach it.
        """
        self._send(OpenStore(round, host))

    def stop(
        self,
        signal: int = signal.SIGTERM,
        grace_s: float = 0.0,
        keep_stores_from: int | None = None,
        *,
        heeded_only: bool = False,
        spare: bool = False,
        keep: tuple[int, ...] = (),
    ) -> None:
        """End every rank with all its descendants → Exited for each rank, then AllStopped.

        ``signal`` goes to the ranks' process groups; ``grace_s`` later, or as soon as all ranks are gone, everything
        that is left gets SIGKILL (0: at once). StopFailed tells of processes that even SIGKILL did not end in
        ``kill_timeout_s``. The stores end as well, but for those of rounds from ``keep_stores_from`` on. A second
        call replaces the first one's signal and grace. ``heeded_only``: the grace is for ranks that handle the signal.
        ``spare``: all ranks have ended well, and what they left running is awaited for ``grace_s``, but not killed.
        ``keep``: pids of ranks that live on.
        """
        self._send(Stop(signal, grace_s, self._kill_timeout_s, keep_stores_from, heeded_only, spare, keep))

    def events(self) -> list[SpawnerEvent]:
        """Return what has happened since the last call, oldest first; never blocks."""
        events: list[SpawnerEvent] = []
        self._reap_orphans()
        while self._link is not None:
            try:
                packet = self._link.recv(MAX_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                packet = b""
            if not packet:
                events.append(self._bury())
                break
            events.append(from_spawner.decode(packet))
        return events

    def kill(self) -> SpawnerDied | None:
        """End the process at once with everything below it, even where it hangs. None where it does not run."""
        return None if self._process is None else self._bury()

    def release(self) -> list[int]:
        """End the process alone. Return the pids that ranks that ended well have left running below it."""
        if self._process is None or self._link is None:
            return []
        below = process_tree.descendants(self._process.pid)
        self._process.kill()
        self._process.wait(timeout=max(1.0, self._kill_timeout_s))
        self._link.close()
        self._process = self._link = None
        return [pid for pid in process_tree.without_trackers(below) if process_tree.runs(pid)]

    def _bury(self) -> SpawnerDied:
        assert self._process is not None and self._link is not None
        below = process_tree.descendants(self._process.pid)
        segments = shared_memory.held(below, self._began)
        process_tree.send([self._process.pid, *process_tree.without_trackers(below)], signal.SIGKILL)
        try:
            code: int | None = self._process.wait(timeout=max(1.0, self._kill_timeout_s))
        except subprocess.TimeoutExpired:
            code = None  # uninterruptible: it does not run any more, and the kernel ends it when it can
        when = time.time()
        self._link.close()
        self._process = self._link = None
        swept = process_tree.sweep(self.token)
        if segments:
            process_tree.wait_for_ends(below, process_tree.TRACKERS_S)  # until then they hold what they had open
            shared_memory.remove(segments)
        self._orphans = sorted({*below, *swept})
        self._reap_orphans()
        exited, number = (code, None) if code is None or code >= 0 else (None, -code)
        return SpawnerDied(exited, number, when, tuple(self._orphans))

    def _reap_orphans(self) -> None:
        process_tree.reap(self._orphans)

    def _send(self, command: Command) -> None:
        link = self._running()
        try:
            link.send(to_spawner.encode(command))
        except BlockingIOError as error:
            raise LaunchError(
                "the spawner process takes no commands (it hangs); kill() it and start it again"
            ) from error
        except ConnectionError:
            pass  # SpawnerDied follows
        except OSError as error:
            raise LaunchError(f"cannot send {type(command).__name__} to the spawner: {error.strerror}") from error

    def _running(self) -> socket.socket:
        if self._link is None:
            raise LaunchError("the spawner does not run; call start() first")
        return self._link
