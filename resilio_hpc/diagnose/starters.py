"""Starts a checker on every node: as processes of this machine, or as tasks of a step of srun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import msgspec

from resilio_hpc.core.json_fields import printable
from resilio_hpc.diagnose import interpreter
from resilio_hpc.diagnose.messages import NodeSettings
from resilio_hpc.diagnose.policy import CheckRequest
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.client.step_environment import for_srun, gpu_flags

FAREWELL_S = 5.0
_DEATH_S = 2.0
OWN_STEPS = 32  # nodes that did not come with all the others and get their own step
CheckerOf = Callable[[str], Sequence[str]]  # the command of a node's checker


class Checkers:
    """A process that runs the checkers of some nodes: a checker, or an srun."""

    def __init__(
        self, nodes: Sequence[str], argv: Sequence[str], settings: NodeSettings, env: Mapping[str, str]
    ) -> None:
        self.nodes = tuple(nodes)
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in ``end``
        self._process = subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said,
            start_new_session=True, env=dict(env), cwd="/",
        )  # fmt: skip
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def why(self) -> str:
        """Return how it ended."""
        code = self._process.poll()
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 4000))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return printable(f"{how}{': ' if lines else ''}{lines[-1] if lines else ''}", 300)

    def end(self, wait_s: float) -> None:
        """Wait for its end, terminate it, kill it."""
        for number, patience_s in ((0, wait_s), (signal.SIGTERM, _DEATH_S), (signal.SIGKILL, _DEATH_S)):
            if number and not self.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            try:
                self._process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        self._said.close()


def close_all(checkers: Sequence[Checkers]) -> None:
    """End all of them, in little more than the time of one."""
    deadline = time.monotonic() + FAREWELL_S
    for each in checkers:
        each.end(max(0.0, deadline - time.monotonic()))


class LocalStarter:
    """This machine plays the nodes; each gets its share of the CPUs."""

    def __init__(self, request: CheckRequest, checker: CheckerOf | None = None) -> None:
        self._request = request
        self._checker = checker or (lambda _: interpreter.command("checker"))
        self.checkers: list[Checkers] = []

    def start(self, secret: bytes, port: int) -> None:
        """Start one process per node."""
        nodes = self._request.nodes
        threads = max(1, len(os.sched_getaffinity(0)) // len(nodes))
        env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        for node in nodes:
            settings = _settings(self._request, secret, port, node, threads)
            self.checkers.append(Checkers((node,), self._checker(node), settings, env))

    def missing(self, heard: Sequence[str]) -> Mapping[str, str]:
        """Return those whose process has ended."""
        return {each.nodes[0]: each.why() for each in self.checkers if each.ended}

    def close(self) -> None:
        """End the processes."""
        close_all(self.checkers)


class SrunStarter:
    """One step with a task on every node.

    Nodes that do not come with it, since one that is dead keeps srun from starting the others, get their own step once.
    """

    def __init__(self, request: CheckRequest, checker: CheckerOf | None = None) -> None:
        self._request = request
        self._checker = checker or (lambda _: interpreter.command("checker"))
        self._steps: list[Checkers] = []
        self._given: tuple[bytes, int] = (b"", 0)
        self._outside: tuple[str, ...] = ()

    def start(self, secret: bytes, port: int) -> None:
        """Start the step of all nodes that are still in the job."""
        self._given = secret, port
        nodes = self._request.nodes
        present = commands.job_nodes(self._request.job) if self._request.job else None
        if present is not None:
            self._outside = tuple(node for node in nodes if node not in present)
        self._step([node for node in nodes if node not in self._outside])

    def _step(self, nodes: Sequence[str]) -> None:
        if not nodes:
            return
        in_job = self._request.place == "step"
        environment = for_srun(os.environ) if in_job else os.environ
        flags = gpu_flags(os.environ, nodes[0]) if in_job else ()
        argv = (*srun_argv(self._request, nodes), *flags, *self._checker(""))
        self._steps.append(Checkers(nodes, argv, _settings(self._request, *self._given), environment))

    def missing(self, heard: Sequence[str]) -> Mapping[str, str]:
        """Return those whose step has ended, and those that Slurm took out of the job."""
        gone = dict.fromkeys(self._outside, "Slurm has taken it out of the job")
        first = self._steps[0] if self._steps else None
        if first is not None and first.ended and len(self._steps) == 1 and self._request.place == "step":
            absent = [node for node in first.nodes if node not in heard]
            if 0 < len(absent) <= max(OWN_STEPS, 1) and len(first.nodes) > 1:
                for node in absent:
                    self._step([node])
        for step in self._steps:
            if step.ended:
                gone.update(dict.fromkeys(step.nodes, step.why()))
            else:
                for node in step.nodes:
                    gone.pop(node, None)
        return gone

    def close(self) -> None:
        """End the processes."""
        close_all(self._steps)


def _settings(request: CheckRequest, secret: bytes, port: int, node: str = "", threads: int = 0) -> NodeSettings:
    return NodeSettings(
        secret=secret.decode(), endpoint=f"{request.address}:{port}", node=node, threads=threads,
        policy=request.policy,
    )  # fmt: skip


def srun_argv(request: CheckRequest, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return a step with a task per node, which shares the nodes with whatever runs there. Pure."""
    return (
        "srun", "--no-kill", "--kill-on-bad-exit=0", "--wait=0",
        *(("--overlap", "--export=ALL") if request.place == "step" else ()),
        f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={compress(nodes)}",
        "--chdir=/", *((f"--cpus-per-task={request.cpus}",) if request.cpus else ()), "--mpi=none",
        "--unbuffered", "--job-name=resilio-check", *request.srun_options,
    )  # fmt: skip
