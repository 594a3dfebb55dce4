"""A task of an MPI step: asks the agent of its node which rank to be, starts the rank, and reports how it ended.

The rank is a child, so its exit is seen exactly and no process of it is left behind: it dies with this task (the kernel
ensures that), and this task ends it when the agent is gone. Signals of Slurm to the whole step are left to the agent.
``python -c … RUN_ID ROUND``, started by srun, see ``step.task_argv``.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from resilio_hpc.core import process_title
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.rundir import node_directories
from resilio_hpc.launch.workers.forking import forked_child
from resilio_hpc.launch.workers.forking.spawner_messages import MAX_BYTES, Exited, RankCommand, SpawnFailed, Started
from resilio_hpc.launch.workers.mpi import messages as mm

PATIENCE_S = 20.0  # a killed agent is back within seconds
RETRY_S = 0.1
_LEFT_TO_THE_AGENT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Run one MPI task."""
    run_id, number = sys.argv[1:]
    process_tree.become_subreaper()
    process_tree.outlive_warnings()
    process_title.show("mpi_task", f"{run_id}:{_variable('SLURMD_NODENAME')}", "round", number)
    for warning in _LEFT_TO_THE_AGENT:
        signal.signal(warning, signal.SIG_IGN)
    link = _connect(run_id, _variable("SLURMD_NODENAME"))
    link.send(mm.to_agent.encode(mm.Present(int(number), int(_variable("SLURM_PROCID")))))
    packet = link.recv(MAX_BYTES)
    if not packet:
        sys.exit("the agent of this node ended")
    command = mm.to_task.decode(packet)
    if isinstance(command, mm.NotWanted):
        print(f"this task is not wanted: {command.reason}", file=sys.stderr)
        sys.exit(0)
    code = _run(link, command)
    _end_what_is_left(code)
    os._exit(code)


def _end_what_is_left(code: int) -> None:
    """End what a failed rank left running. The step ends what a rank that ended well left running."""
    own = os.getpid()
    if code:
        process_tree.kill_descendants(own, frozenset(filter(process_tree.is_tracker, process_tree.descendants(own))))
    deadline = time.monotonic() + process_tree.TRACKERS_S
    while any(map(process_tree.is_tracker, process_tree.descendants(own))) and time.monotonic() < deadline:
        time.sleep(RETRY_S / 10)
    if code:
        process_tree.kill_descendants(own)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        sys.exit(f"{name} is not set: MPI tasks are started by srun")
    return value


def _connect(run_id: str, node: str) -> socket.socket:
    """Return a link to the agent, which may be restarting."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        try:
            directory, _ = node_directories.found(run_id, node)
            if directory is None:
                raise FileNotFoundError(errno.ENOENT, "it has no directory there")
            link.connect(str(directory / mm.SOCKET_NAME))
            return link
        except OSError as error:
            link.close()
            if time.monotonic() > deadline:
                sys.exit(f"no agent of this run on {node}: {error.strerror}")
            time.sleep(RETRY_S)


def _run(link: socket.socket, command: RankCommand) -> int:
    """Start the rank and wait for its end, or the agent's. Return this task's exit code."""
    try:
        program = forked_child.program(command, os.environ)
        forked_child.check_directory(command.cwd)
        stdout, stderr = forked_child.open_outputs(command)
    except OSError as error:
        _send(link, SpawnFailed(command.local_rank, f"{error.filename}: {error.strerror}"))
        return 1
    try:
        pid = forked_child.fork()
    except OSError as error:
        _send(link, SpawnFailed(command.local_rank, f"cannot fork: {error.strerror} (limits on processes, memory?)"))
        return 1
    if pid == 0:
        _become_rank(command, stdout, stderr, program)
    for fd in {stdout, stderr}:
        os.close(fd)
    _send(link, Started(command.local_rank, pid, time.time(), "mpi", ""))
    return _watch(link, command.local_rank, pid)


def _become_rank(command: RankCommand, stdout: int, stderr: int, program: tuple[str, ...]) -> NoReturn:
    """Become the rank, in the child. Descriptors from slurmstepd (PMI_FD) are passed on to the program."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    forked_child.detach(os.getppid(), ())
    forked_child.become_rank(command, stdout, stderr, program)
    os._exit(126)


def _watch(link: socket.socket, local_rank: int, pid: int) -> int:
    exit_fd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(exit_fd, select.POLLIN)
    poll.register(link, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if exit_fd in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            exit_code, number = (code, None) if code >= 0 else (None, -code)
            _send(link, Exited(local_rank, pid, exit_code, number, time.time(), "mpi"))
            return code if code >= 0 else 128 - code
        if not _peer_lives(link):
            process_tree.signal_group(pid, signal.SIGKILL)
            return 1


def _peer_lives(link: socket.socket) -> bool:
    try:
        return bool(link.recv(MAX_BYTES))
    except OSError:
        return False


def _send(link: socket.socket, message: mm.ToAgent) -> None:
    try:
        link.send(mm.to_agent.encode(message))
    except OSError:
        pass  # the agent is gone; _watch notices next
