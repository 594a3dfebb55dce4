"""Notifications about a run: the agent's side. Nothing here blocks; a target that hangs is killed.

The agent that is the controller notifies, on any node, so the loss of the batch host does not end it. An event may be
sent twice when the controller changes just then; its ``id`` is the same both times. ``cwd``: where commands run, if not
here; only the child enters it, since it may hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from resilio_hpc.launch.notify.events import Notice, NoticeMaker
from resilio_hpc.launch.notify.rate import Throttle
from resilio_hpc.launch.notify.sender import ATTEMPTS, SEND_TIMEOUT_S
from resilio_hpc.launch.process import bootstrap, process_tree
from resilio_hpc.launch.process.announce import announcement, say
from resilio_hpc.launch.rundir.notify_targets import Target, kept
from resilio_hpc.launch.rundir.run_directory import RunIdentity

ANSWER_TIMEOUT_S = ATTEMPTS * SEND_TIMEOUT_S + 5.0
FAREWELL_S = 5.0
VERSION = 1
Record = Callable[..., None]  # Ledger.append


class Channel:
    """One target and its child, which is started ahead of time, or when there is something to send."""

    answer_timeout_s = ANSWER_TIMEOUT_S

    def __init__(self, target: Target, cwd: str = "") -> None:
        self.target = target
        self._cwd = cwd
        self.throttle = Throttle()
        self._child: subprocess.Popen[bytes] | None = None
        self._busy_until: float | None = None  # a message is on its way
        self._buffer = b""

    @property
    def busy(self) -> bool:
        """Return whether a message is on its way."""
        return self._busy_until is not None

    @property
    def idle(self) -> bool:
        """Return whether no message is on its way or waits."""
        return not self.busy and self.throttle.empty

    def fileno(self) -> int | None:
        """Return the descriptor on which an answer arrives."""
        return self._child.stdout.fileno() if self._child is not None and self._child.stdout is not None else None

    def start(self) -> None:
        """Start the child ahead of time; a failure shows when it is needed."""
        with contextlib.suppress(OSError):
            self._start()

    def send(self, message: dict[str, Any], now: float) -> str:
        """Pass a message to the child. Return why that failed, or ""."""
        try:
            child = self._child or self._start()
            assert child.stdin is not None
            os.write(child.stdin.fileno(), json.dumps(message).encode() + b"\n")  # far below a pipe's 64 KiB
        except OSError as error:
            self.kill()
            return error.strerror or "the sending process cannot be started"
        self._busy_until = now + self.answer_timeout_s
        return ""

    def _start(self) -> subprocess.Popen[bytes]:
        command = [*bootstrap.command("launch.notify.sender"), str(os.getpid()), self._cwd]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdin is not None and child.stdout is not None
        for pipe in (child.stdin, child.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._child = child
        os.write(child.stdin.fileno(), json.dumps(self.target.text).encode() + b"\n")
        return child

    def outcome(self, now: float) -> str | None:
        """Return the result of the message on its way: "" when it was delivered, else why not; None: not known yet."""
        descriptor = self.fileno()
        if self._busy_until is None or descriptor is None:
            return None
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            if now <= self._busy_until:
                return None
            self.kill()
            return f"no answer within {self.answer_timeout_s:g} s"
        if not data:
            self.kill()
            return "the sending process died"
        self._buffer += data
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            return None
        self._buffer, self._busy_until = rest, None
        return str(json.loads(line).get("error", ""))

    def kill(self) -> None:
        """Kill the child, and the command that it may be running."""
        child, self._child, self._busy_until, self._buffer = self._child, None, None, b""
        if child is None:
            return
        process_tree.kill_descendants(child.pid)
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # in uninterruptible sleep, so it cannot be waited for


class Notifier:
    """Takes the controller's ledger entries, and sends notifications to the run's targets."""

    def __init__(
        self, run: RunIdentity, job: str, record: Record, targets: tuple[Target, ...] | None = None, cwd: str = ""
    ) -> None:
        self._run = run
        self._job = job
        self._record = record
        self._channels = [Channel(target, cwd) for target in (kept(run.path) if targets is None else targets)]
        self._maker = NoticeMaker()
        self._failing: set[str] = set()  # targets whose failure is in the ledger
        self._started = False

    def take(self, entry: str, fields: Mapping[str, Any]) -> None:
        """Take one ledger entry of the controller's."""
        if self._channels:
            self._start_senders()
            self._maker.take(entry, fields, time.time())

    def _start_senders(self) -> None:
        """Start the children at the controller's first entry, while nothing is wrong.

        The interpreter may lie on a file system that hangs later; a caller that starts a process from there waits with
        it.
        """
        if not self._started:
            self._started = True
            for channel in self._channels:
                channel.start()

    def tick(self) -> None:
        """Send what is due, and take the results."""
        if not self._channels:
            return
        self._collect(time.time())
        now = time.monotonic()
        for channel in self._channels:
            self._move(channel, now, at_once=False)

    def _collect(self, unix: float) -> None:
        for notice in self._maker.due(unix):
            for channel in self._channels:
                channel.throttle.add(notice)

    def _move(self, channel: Channel, now: float, at_once: bool) -> None:
        self._note(channel, channel.outcome(now))
        if not channel.busy and (notice := channel.throttle.take(now, at_once)) is not None:
            error = channel.send(self._message(notice), now)
            self._note(channel, error or None)

    def _note(self, channel: Channel, outcome: str | None) -> None:
        """Record a failure once, until a message is delivered again."""
        name = channel.target.name
        if outcome == "":
            self._failing.discard(name)
        elif outcome is not None and name not in self._failing:
            self._failing.add(name)
            self._record("notify_failed", target=name, error=outcome)
            say(announcement("notify_failed", {"target": name, "error": outcome}))

    def _message(self, notice: Notice) -> dict[str, Any]:
        return {
            "v": VERSION, "id": f"{self._run.run_id}/{self._job}/{notice.event}/{notice.about}",
            "run_id": self._run.run_id, "run_dir": str(self._run.path), "job": self._job, **notice.as_fields(),
            "text": f"{self._run.path.name}: {notice.text}",
        }  # fmt: skip

    def close(self, timeout_s: float = FAREWELL_S) -> None:
        """Send what is left, the verdict first, and end the children."""
        self._collect(float("inf"))
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline and not all(channel.idle for channel in self._channels):
            for channel in self._channels:
                self._move(channel, now, at_once=True)
            waited = [fd for channel in self._channels if (fd := channel.fileno()) is not None]
            select.select(waited, [], [], 0.05)
        for channel in self._channels:
            if not channel.idle:
                self._note(channel, "not delivered before the agent's end")
            channel.kill()


def tell_verdict(run: RunIdentity, job: str, record: Record, verdict: Mapping[str, Any]) -> None:
    """Send a verdict that no controller has sent. Takes up to ``FAREWELL_S``."""
    notifier = Notifier(run, job, record)
    notifier.take("verdict", verdict)
    notifier.close()
