"""This node's checker for a test of nodes: a process that does what the test's coordinator orders."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import msgspec

from resilio_hpc.diagnose import interpreter
from resilio_hpc.diagnose.messages import NodeSettings
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.node_context import NodeContext

DEATH_S = 2.0


class NodeProbe:
    """At most one checker. It ends with this process, with its coordinator, or at its time limit."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._process: subprocess.Popen[bytes] | None = None
        self._test: tuple[int, int] = (-1, -1)  # epoch and number
        self._until = 0.0

    def order(self, message: m.BeginProbe | m.EndProbe) -> None:
        """Carry out an order of the controller; one may come twice."""
        test = (message.epoch, message.test)
        if isinstance(message, m.EndProbe):
            if test >= self._test:
                self.end()
        elif test > self._test:
            self._test, self._until = test, time.monotonic() + message.limit_s
            self._begin(message.settings)

    def _begin(self, text: str) -> None:
        self.end()
        settings = msgspec.json.decode(text, type=NodeSettings)
        settings = msgspec.structs.replace(settings, node=self._node.name, parent=os.getpid())
        alone = settings.endpoint.startswith(("127.", "localhost"))
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ} if alone else dict(os.environ)
        log = self._node.local_dir / "probe.log"
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    interpreter.command("checker"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                    start_new_session=True, cwd="/", env=environment,
                )  # fmt: skip
        except OSError as error:
            self._node.say(f"a test of nodes cannot start here: {error}")
            return
        assert self._process.stdin
        with contextlib.suppress(OSError):  # far less than a pipe holds
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.close()

    def tick(self) -> None:
        """End a checker that outlives its test."""
        process = self._process
        if process is not None and (process.poll() is not None or time.monotonic() > self._until):
            self.end()

    def end(self) -> None:
        """Kill the checker; its prober dies with it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEATH_S)

    def close(self) -> None:
        """See ``end``."""
        self.end()
