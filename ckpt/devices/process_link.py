"""This end of the connection to a device's process: requests go without waiting, and replies come in their order.

Every wait has a limit: a device that says nothing for so long, or that ends, is lost.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from resilio_hpc.ckpt.devices.device_process import LENGTH, MOST_HEADER, DeviceReply, DeviceRequest
from resilio_hpc.core.errors import DeviceLost

_LOOK_S = 0.5
_END_S = 10.0


@dataclass(frozen=True)
class DeviceFailure:
    """Why a device is of no use any more. ``number``: of the command that it could not do; -1: it ended, or hangs."""

    text: str
    number: int = -1


class ProcessLink:
    """A running device, and what it was asked to do."""

    def __init__(self, argv: Sequence[str], environment: dict[str, str], timeout_s: float) -> None:
        """Start a device. Raises OSError."""
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._wanted: dict[int, memoryview | None] = {}
        self._answers: dict[int, bytes] = {}
        self._ticket = self._done = 0
        self.done_number = 0
        """The last command that is done."""
        self.failure: DeviceFailure | None = None
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(argv, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_LOOK_S)
        self._socket = ours
        self._heard_at = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="resilio-device", daemon=True)
        self._reader.start()

    @property
    def ticket(self) -> int:
        """Return the number of the last request."""
        return self._ticket

    def send(
        self,
        make: Callable[[int], DeviceRequest],
        data: bytes | memoryview = b"",
        into: memoryview | None = None,
        answers: bool = False,
    ) -> int:
        """Send a request, made with its ticket, and return the ticket; not for several threads at a time.

        ``into``: where its answer goes; ``answers``: it is kept for ``wait``. Raises DeviceLost.
        """
        self._check()
        with self._changed:
            if self._done == self._ticket:
                self._heard_at = time.monotonic()  # it had nothing to say before
            self._ticket += 1
            if into is not None or answers:
                self._wanted[self._ticket] = into
        header = msgspec.msgpack.encode(make(self._ticket))
        self._send(LENGTH.pack(len(header)) + header)
        if len(data):
            self._send(data)
        return self._ticket

    def _send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except TimeoutError:
                self._look()
            except OSError as error:
                self._fail(f"the device ended ({error.strerror or error})")
            self._check()

    def wait(self, ticket: int, timeout_s: float | None = None) -> bool:
        """Return True once a request is done; False after ``timeout_s``. Raises DeviceLost."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._done >= ticket:
                    return True
                left = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
                if left <= 0:
                    return False
                if self.failure is None:
                    self._changed.wait(left)
                if self._done >= ticket:
                    return True
            self._look()
            if self.failure is not None:
                self.settle()
            self._check()

    def settle(self) -> None:
        """Wait for the end of a device that failed: nothing is written to memory that awaits an answer any more."""
        if threading.current_thread() is not self._reader:
            self._reader.join(_END_S)
        self._wanted.clear()

    def answer(self, ticket: int) -> bytes:
        """Return the answer of a request that is done."""
        with self._changed:
            return self._answers.pop(ticket)

    def _look(self) -> None:
        if self.failure is None and time.monotonic() - self._heard_at > self._timeout_s:
            self._fail(f"the device has not answered for {self._timeout_s:g} s")

    def _check(self) -> None:
        failure = self.failure
        if failure is not None:
            raise DeviceLost(failure.text)

    def _fail(self, text: str, number: int = -1) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = DeviceFailure(text, number)
            self._changed.notify_all()
        self.process.kill()

    # -- replies, in a thread of their own -------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                length = LENGTH.unpack(self._receive(LENGTH.size))[0]
                if length > MOST_HEADER:
                    raise ValueError(f"a reply of {length} bytes")
                reply = msgspec.msgpack.decode(self._receive(length), type=DeviceReply)
                self._take(reply)
                if reply.error:
                    self._fail(f"the device cannot do command {reply.number}: {reply.error}", reply.number)
                    return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._fail(f"the device ended ({error})")

    def _take(self, reply: DeviceReply) -> None:
        with self._changed:
            into = self._wanted.get(reply.ticket)
            is_wanted = reply.ticket in self._wanted
        if into is not None and len(into) == reply.data_bytes:
            self._receive_into(into)
        else:
            data = self._receive(reply.data_bytes)
            if is_wanted:
                self._answers[reply.ticket] = data
        with self._changed:
            self._wanted.pop(reply.ticket, None)
            if not reply.error:
                self._done, self.done_number = reply.ticket, reply.number
            self._heard_at = time.monotonic()
            self._changed.notify_all()

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, view: memoryview) -> None:
        while view:
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                if self.failure is not None:
                    raise ConnectionError(self.failure.text) from None
                continue
            if not count:
                raise ConnectionError("its connection is closed")
            view = view[count:]

    def close(self) -> None:
        """End the device. What it had is gone."""
        self._fail("the device was closed")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.settle()
        self._socket.close()
