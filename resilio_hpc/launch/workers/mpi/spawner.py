"""Starts ranks through one srun step per round, so that they get a PMI; has the interface of a ``spawner.Spawner``.

The agent of node rank 0 starts the step (``launch``); on every node the step's tasks ask the local agent for their
command (``tasks``). There is no process in between, and no torch: of a program that uses torch beside MPI, rank 0 opens
the rendezvous store by itself. The store may die with that rank, since PMI ends all ranks of a step with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGCONT

import msgspec
from msgspec import Struct

from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.forking.store_host import free_port
from resilio_hpc.launch.workers.mpi import step
from resilio_hpc.launch.workers.mpi.messages import SOCKET_NAME
from resilio_hpc.launch.workers.mpi.tasks import MpiTasks
from resilio_hpc.launch.workers.spawner import RESOLVER_OPTIONS

RANK_VARIABLE = "RESILIO_MPI_TOKEN"  # marks ranks and their descendants only; the tree's token marks srun as well
SRUN_GRACE_S = 0.3  # after SIGTERM to its srun, a step without a lost node ends within this time
KILL_TIMEOUT_S = 5.0
# srun prints this when a node is lost meanwhile
LAUNCH_FAILED = re.compile("launch failed|unable to create step", re.IGNORECASE)


class _Stopping(Struct):
    begun: float
    grace_until: float
    killed: float = 0.0  # when; 0: not yet
    reported: bool = False
    spare: bool = False


class MpiSpawner:
    """One node's part of the MPI steps; ``environment`` holds the token of the process tree. Not safe for threads."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self._environment = {"RES_OPTIONS": RESOLVER_OPTIONS, **environment}
        self.token = self._environment[process_tree.TOKEN_VARIABLE]
        self._tasks = MpiTasks(directory / SOCKET_NAME)
        self._log = directory / "mpi-step.log"
        self._hostfile = directory / "mpi-hosts"
        self._step: subprocess.Popen[bytes] | None = None
        self._step_fd = -1
        self._stopping: _Stopping | None = None
        self._events: list[sm.SpawnerEvent] = []

    def start(self) -> None:
        """Do nothing: no preparation is needed."""

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll."""
        yield from self._tasks.filenos()
        if self._step_fd >= 0:
            yield self._step_fd

    # -- orders ------------------------------------------------------------------------------------------------

    def open_store(self, round: int, host: str) -> None:
        """Find a free port for the store that rank 0 opens if it uses torch."""
        self._events.append(free_port(round, host))

    def expect(self, round: int, member: m.Member) -> None:
        """Expect the ranks of ``round``."""
        self._tasks.expect(round, member.first_rank, member.local_world_size)

    def spawn(self, command: sm.RankCommand) -> None:
        """Keep a rank's command for the task that will ask for it."""
        own = {
            RANK_VARIABLE: self.token,
            process_tree.TOKEN_VARIABLE: self.token,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        self._events += self._tasks.give(msgspec.structs.replace(command, env={**command.env, **own}))

    def launch(self, run_id: str, round: int, mpi: str, members: Sequence[m.Member]) -> None:
        """Start the step of a round on all its nodes; exactly one agent does this."""
        self._hostfile.write_text(step.hostfile_text(members))
        environment = step.step_environment(self._environment, self._hostfile)
        argv = step.srun_argv(mpi, members, environment, step.task_argv(run_id, round))
        try:
            with self._log.open("wb") as log:
                self._step = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        except OSError as error:
            self._events.append(sm.SpawnFailed(0, f"cannot start srun: {error.strerror}"))
            return
        self._step_fd = os.pidfd_open(self._step.pid)

    def stop(
        self,
        signal: int,
        grace_s: float,
        keep_stores_from: int | None,
        *,
        heeded_only: bool = False,
        spare: bool = False,
        keep: tuple[int, ...] = (),
    ) -> None:
        """End every rank of this node, and the step if it was started here → AllStopped. Otherwise like a spawner's."""
        now = time.monotonic()
        if self._stopping is not None and self._stopping.killed:
            return
        self._tasks.refuse()
        if heeded_only and not any(process_tree.handles(pid, signal) for pid in self._tasks.running()):
            grace_s = 0.0
        self._stopping = _Stopping(now, now + grace_s, spare=spare)
        if grace_s > 0 and not spare:
            for pid in self._tasks.running():
                process_tree.signal_group(pid, signal)
                process_tree.signal_group(pid, SIGCONT)  # a stopped rank cannot act on the first signal
        self._stop_further(self._stopping)

    def release(self) -> list[int]:
        """Leave what ranks have left running, which Slurm ends with the step. Return those processes."""
        self._tasks.close()
        return process_tree.with_token(self.token, variable=RANK_VARIABLE)

    def kill(self) -> None:
        """End everything at once."""
        self._tasks.close()
        self._kill_step()
        process_tree.sweep(self.token, variable=RANK_VARIABLE)

    # -- events ------------------------------------------------------------------------------------------------

    def events(self) -> list[sm.SpawnerEvent]:
        """Return what has happened since the last call, oldest first; never blocks."""
        self._events += self._tasks.serve()
        self._tasks.left()
        self._look_at_step()
        if self._stopping is not None:
            self._stop_further(self._stopping)
        events, self._events = self._events, []
        return events

    def _look_at_step(self) -> None:
        if self._step is None or (code := self._step.poll()) is None:
            return
        self._forget_step()
        launched = code >= 0 and self._tasks.started() and not LAUNCH_FAILED.search(read_log(self._log))
        if self._stopping is not None or launched:
            return  # the tasks report how their ranks ended
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = last_error(read_log(self._log))
        self._events.append(sm.SpawnFailed(0, f"the srun of the MPI step {end}{': ' if said else ''}{said}"))

    def _stop_further(self, stopping: _Stopping) -> None:
        """Kill when the ranks are gone or the grace is over; report when no rank is left."""
        now = time.monotonic()
        if not stopping.killed:
            waits = self._step is not None if stopping.spare else bool(self._tasks.running())
            if waits and now < stopping.grace_until:
                return
            self._end_all(stopping, now)
        if self._step is not None and now > stopping.killed + SRUN_GRACE_S:
            self._kill_step()
        left = self._tasks.left()
        if not left and self._step is None:
            self._stopping = None
            self._events.append(sm.AllStopped(time.monotonic() - stopping.begun))
        elif left and not stopping.reported and now > stopping.killed + KILL_TIMEOUT_S:
            stopping.reported = True
            pids = process_tree.with_token(self.token, variable=RANK_VARIABLE)
            self._events.append(sm.StopFailed(tuple(pids), now - stopping.begun))

    def _end_all(self, stopping: _Stopping, now: float) -> None:
        stopping.killed = now
        self._tasks.kill()
        if self._step is not None:
            self._step.terminate()  # srun then ends the step on all nodes
        process_tree.sweep(self.token, variable=RANK_VARIABLE)

    def _kill_step(self) -> None:
        if self._step is not None:
            self._step.kill()
            self._step.wait()
            self._forget_step()

    def _forget_step(self) -> None:
        os.close(self._step_fd)
        self._step, self._step_fd = None, -1


def read_log(log: Path) -> str:
    """Return the last 64 KiB of srun's output, which may be empty."""
    try:
        return log.read_bytes()[-65536:].decode(errors="replace")
    except OSError:
        return ""


def last_error(said: str) -> str:
    """Return the last line of srun's output that looks like an error, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:1000]
