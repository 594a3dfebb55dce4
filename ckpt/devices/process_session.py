"""A device in another process, with the log of its commands: what is lost with the process is rebuilt in a new one.

Where the session has a directory of this node's memory, the log outlives this process, too: the next process of the
same rank finds it as ``former``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from resilio_hpc.ckpt.devices.command_log import MOST_BYTES, MOST_COMMANDS, CommandLog
from resilio_hpc.ckpt.devices.device_process import DeviceRequest
from resilio_hpc.ckpt.devices.log_entries import Argument, DeviceCommand, Entry, LogFile, Marked, read_entries
from resilio_hpc.ckpt.devices.process_link import ProcessLink
from resilio_hpc.core import interpreter
from resilio_hpc.core.errors import DeviceLost

_MOST_STARTS = 5
"""Devices started for one rebuild. One that is lost twice at the same command is not started again."""
_WINDOW = 256  # commands that a new device may be behind


def device_command() -> tuple[str, ...]:
    """Return the command that is a device of this package."""
    return sys.executable, "-c", interpreter.source("ckpt.devices.device_process")


class DeviceSession:
    """One device. Any thread may use it; commands are done in the order of the calls."""

    def __init__(
        self,
        directory: Path | None = None,
        name: str = "device",
        timeout_s: float = 60.0,
        command: Sequence[str] = (),
        most_commands: int = MOST_COMMANDS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Start a device.

        ``directory``: in memory, for the log (None: it ends with this process); ``name``: of this rank's device there;
        ``timeout_s``: a device that says nothing for so long is lost. Raises OSError.
        """
        self._command, self._timeout_s = tuple(command) or device_command(), timeout_s
        self._bounds = most_commands, most_bytes
        self._lock = threading.RLock()
        self._freed: deque[int] = deque()
        self.former: list[Entry] = []  # what a process before this one left
        file = None
        if directory is not None:
            self._adopt(directory / f"{name}.commands", directory / f"{name}.former")
            file = LogFile(directory / f"{name}.commands")
        self._file, self.log = file, CommandLog(file, (), *self._bounds)
        self._next_buffer = 1 + max((_last_buffer(entry) for entry in self.former), default=0)
        self.rebuilds = 0
        self.captures = 0
        self._is_closed = False
        self._link = self._start()

    def _adopt(self, path: Path, former: Path) -> None:
        """Take what an earlier process left. One that was killed before its first mark does not count."""
        found = read_entries(path)
        if any(isinstance(entry, Marked) for entry in found):
            path.replace(former)
        else:
            path.unlink(missing_ok=True)
        self.former = read_entries(former)

    def _start(self) -> ProcessLink:
        path = [*(str(Path(place).absolute()) for place in sys.path if place), interpreter.PACKAGE_PARENT]
        own = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return ProcessLink(self._command, {**os.environ, **own, "PYTHONPATH": os.pathsep.join(path)}, self._timeout_s)

    @property
    def pid(self) -> int:
        """Return the process that is the device."""
        return int(self._link.process.pid)

    @property
    def is_lost(self) -> bool:
        """Return whether the device is known to be lost, and was not closed."""
        return self._link.failure is not None and not self._is_closed

    # -- commands --------------------------------------------------------------------------------------------------

    def allocate(self, dtype: str, size_bytes: int) -> int:
        """Return a new buffer of zeros. Raises DeviceLost, as all others do."""
        with self._lock:
            buffer = self._next_buffer
            self._next_buffer += 1
            self.submit("allocate", (), (buffer,), (dtype, size_bytes), allocates=(buffer,))
            return buffer

    def free_later(self, buffer: int) -> None:
        """Free a buffer with the next command: the garbage collector may call this at any time."""
        self._freed.append(buffer)

    def submit(
        self,
        name: str,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        arguments: Sequence[Argument] = (),
        data: bytes = b"",
        allocates: Sequence[int] = (),
        frees: Sequence[int] = (),
    ) -> int:
        """Queue a command, and return its number. It is in the log before the device gets it."""
        with self._lock:
            while self._freed and not frees:
                if (buffer := self._freed.popleft()) in self.log.live:  # a rebuild may have dropped it
                    self.submit("free", frees=(buffer,))
            self._follow()
            if self.log.why_capture:
                self._capture()
            command = self.log.append(name, reads, writes, arguments, data, allocates, frees)
            self._send(command)
            return command.number

    def draw(self, name: str, writes: int, arguments: Sequence[Argument] = ()) -> None:
        """Do a command whose result differs from time to time; the result goes into the log."""
        with self._lock:
            command = self.log.append(name, (), (writes,), arguments, draws=True)
            ticket = self._send(command, answers=True)
            self._link.wait(ticket)
            self.log.record_result(command.number, self._link.answer(ticket))

    def _send(self, command: DeviceCommand, answers: bool = False) -> int:
        name, data = command.name, command.data
        arguments = command.arguments
        if command.result is not None:
            name, arguments, data = "write", (0,), command.result

        def request(ticket: int) -> DeviceRequest:
            return DeviceRequest(
                ticket, command.number, name, command.reads, command.writes, arguments,
                command.allocates, command.frees, len(data),
            )  # fmt: skip

        return self._link.send(request, data, answers=answers)

    def read(self, buffer: int, offset: int, target: memoryview) -> int:
        """Begin to copy a part of a buffer, as it is after all commands so far; return the ticket to ``wait`` for."""
        with self._lock:
            return self._link.send(partial(self._question, "read", (buffer,), (offset, len(target))), into=target)

    def content(self, buffer: int, size_bytes: int) -> bytes:
        """Return a buffer's content."""
        with self._lock:
            return self._ask("read", (buffer,), (0, size_bytes))

    def digest(self, buffers: Sequence[int]) -> bytes:
        """Return the digest of buffers' contents (``device_process.digest_of``)."""
        with self._lock:
            return self._ask("digest", tuple(buffers), ())

    def _ask(self, name: str, reads: tuple[int, ...], arguments: tuple[Argument, ...]) -> bytes:
        ticket = self._link.send(partial(self._question, name, reads, arguments), answers=True)
        self._link.wait(ticket)
        return self._link.answer(ticket)

    def _question(
        self, name: str, reads: tuple[int, ...], arguments: tuple[Argument, ...], ticket: int
    ) -> DeviceRequest:
        return DeviceRequest(ticket, self.log.position, name, reads, (), arguments)

    # -- waiting ---------------------------------------------------------------------------------------------------

    @property
    def ticket(self) -> int:
        """Return the ticket of the last request."""
        return self._link.ticket

    def wait(self, ticket: int) -> None:
        """Return when a request is done."""
        self._link.wait(ticket)

    def synchronize(self, timeout_s: float) -> bool:
        """Wait for all commands so far; return False where they are not done after ``timeout_s``."""
        return self._link.wait(self._link.ticket, timeout_s)

    def _follow(self) -> None:
        self.log.done(self._link.done_number)

    # -- positions -------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """Keep the present position within reach, and return it."""
        with self._lock:
            self._follow()
            return self.log.mark()

    def capture(self) -> None:
        """Take all contents into the log, which drops what led to them."""
        with self._lock:
            self._capture()

    def _capture(self) -> None:
        self.captures += 1
        found = [(buffer, self.content(buffer, int(about[1]))) for buffer, about in self.log.live.items()]
        self._follow()
        self.log.capture(found)

    # -- after a loss ----------------------------------------------------------------------------------------------

    def rebuild(self, position: int | None = None) -> None:
        """Start a new device, and do again what leads to a position (None: to the last command).

        What came after it is dropped. Raises DeviceLost where the position is out of reach, or where a device cannot
        get there; the log is as it was then.
        """
        with self._lock:
            wanted = self.log.position if position is None else position
            failure = self._link.failure
            if failure is not None and failure.number > 0:  # an error of the program's: it and the rest were not done
                wanted = min(wanted, failure.number - 1)
            self._rebuild(self.log, wanted)
            self.log.cut(wanted)

    def rebuild_former(self, position: int) -> None:
        """Rebuild the state that an earlier process had at a position; this session goes on with its log.

        Raises DeviceLost, and this process's own log is as it was then.
        """
        with self._lock:
            former = CommandLog(None, self.former, *self._bounds)
            if not former.reaches(position):
                raise DeviceLost(f"the log of the process before does not reach position {position}")
            self._rebuild(former, position)
            former.cut(position)
            self.log = CommandLog(self._file, former.entries(), *self._bounds)
            self.log.cut(position)
            self._freed.clear()

    def reaches_former(self, position: int) -> bool:
        """Return whether an earlier process left what leads to a position."""
        return bool(self.former) and CommandLog(None, self.former).reaches(position)

    def _rebuild(self, log: CommandLog, position: int) -> None:
        if not log.reaches(position):
            raise DeviceLost(f"the log does not reach position {position}: it was not marked, or long ago")
        self.rebuilds += 1
        last_suspect = -1
        for _ in range(_MOST_STARTS):
            self._link.close()
            self._link = self._start()
            try:
                self._do_again(log, position)
                return
            except DeviceLost as lost:
                suspect = self._suspect(log, position)
                failure = self._link.failure
                name = next((one.name for one in log.until(position)[1] if one.number == suspect), "")
                if failure is not None and failure.number > 0:
                    raise DeviceLost(f"doing the commands again fails: {lost}") from lost
                if name and suspect == last_suspect:
                    raise DeviceLost(
                        f"command {suspect} ({name}) ends the device each time that it is done again: {lost}"
                    ) from lost
                last_suspect = suspect
        raise DeviceLost(f"{_MOST_STARTS} devices in a row were lost while they did the commands again")

    def _suspect(self, log: CommandLog, position: int) -> int:
        """Return the first command that a lost device had not done."""
        done = self._link.done_number
        return next((one.number for one in log.until(position)[1] if one.number > done), -1)

    def _do_again(self, log: CommandLog, position: int) -> None:
        capture, commands = log.until(position)
        for one in capture.buffers:
            self._send(DeviceCommand(capture.position, "allocate", (), (), one.about, b"", (one.buffer,)))
            self._send(DeviceCommand(capture.position, "write", (), (one.buffer,), (0,), one.data))
        for at, command in enumerate(commands):
            ticket = self._send(command)
            if at % _WINDOW == _WINDOW - 1:
                self._link.wait(ticket - _WINDOW // 2)
        self._link.wait(self._link.ticket)

    def close(self) -> None:
        """End the device, and remove its log."""
        with self._lock:
            self._is_closed = True
            self._link.close()
            if self._file is not None:
                self._file.close()
                self._file.path.unlink(missing_ok=True)
                self._file.path.with_suffix(".former").unlink(missing_ok=True)


def _last_buffer(entry: Entry) -> int:
    if isinstance(entry, DeviceCommand):
        return max(entry.allocates, default=0)
    return max(entry.live, default=0) if isinstance(entry, Marked) else 0
