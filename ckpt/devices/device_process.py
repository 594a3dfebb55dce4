"""A process that is a device: it holds buffers, and does commands in the order in which they arrive.

Its state cannot be dumped, and is gone with it. Started by ``process_link``, which it does not outlive.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from resilio_hpc.core import helper_process
from resilio_hpc.native import crc32c

_ALIGNMENT = 64
"""Bytes; the same for each start, so that libraries take the same ways through their loops."""
_LOOK_S = 1.0
LENGTH = struct.Struct("<I")
MOST_HEADER = 1 << 20


class DeviceRequest(msgspec.Struct, frozen=True, array_like=True):
    """A command, or a question about buffers; ``data_bytes`` follow.

    ``ticket``: counts all requests; ``number``: the last command of the log so far, this one included.
    """

    ticket: int
    number: int
    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    arguments: tuple[int | float | str, ...] = ()
    allocates: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    data_bytes: int = 0


class DeviceReply(msgspec.Struct, frozen=True, array_like=True):
    """The request of this ticket is done; ``data_bytes`` follow. ``error``: it could not be, and no later one is."""

    ticket: int
    number: int
    error: str = ""
    data_bytes: int = 0


class DeviceMemory:
    """The buffers of a device, by their numbers: one-dimensional arrays."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray[Any, Any]] = {}

    def do(self, request: DeviceRequest, data: bytes) -> bytes:
        """Do a request; return what it asks for. Raises KeyError, ValueError, TypeError, MemoryError."""
        return OPERATIONS[request.name](self, request, data) or b""


def _allocate(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    dtype, size = np.dtype(str(request.arguments[0])), int(request.arguments[1])
    room = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    first = -room.ctypes.data % _ALIGNMENT
    for buffer in request.allocates:
        memory.buffers[buffer] = room[first : first + size].view(dtype)


def _free(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    for buffer in request.frees:
        del memory.buffers[buffer]


def _write(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    at = int(request.arguments[0]) if request.arguments else 0
    target = memory.buffers[request.writes[0]].view(np.uint8)
    if at + len(data) > len(target):
        raise ValueError(f"{len(data)} bytes at {at} do not fit into {len(target)}")
    target[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)


def _read(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> bytes:
    at, size = int(request.arguments[0]), int(request.arguments[1])
    return memory.buffers[request.reads[0]].view(np.uint8)[at : at + size].tobytes()


def _digest(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> bytes:
    return digest_of([memory.buffers[buffer].tobytes() for buffer in request.reads])


def _copy(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    memory.buffers[request.writes[0]].view(np.uint8)[:] = memory.buffers[request.reads[0]].view(np.uint8)


def _fill(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    memory.buffers[request.writes[0]][:] = request.arguments[0]


def _add(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    one, other = (memory.buffers[buffer] for buffer in request.reads[:2])
    memory.buffers[request.writes[0]][:] = one + other * other.dtype.type(request.arguments[0])


def _multiply(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    one, other = (memory.buffers[buffer] for buffer in request.reads[:2])
    memory.buffers[request.writes[0]][:] = one * other


def _scale(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    one = memory.buffers[request.reads[0]]
    memory.buffers[request.writes[0]][:] = one * one.dtype.type(request.arguments[0])


def _matmul(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> None:
    rows, inner, columns = (int(value) for value in request.arguments)
    one, other = (memory.buffers[buffer] for buffer in request.reads[:2])
    memory.buffers[request.writes[0]].reshape(rows, columns)[:] = one.reshape(rows, inner) @ other.reshape(
        inner, columns
    )


def _normal(memory: DeviceMemory, request: DeviceRequest, data: bytes) -> bytes:
    """Fill with a normal distribution; without a seed (-1) by the system's entropy, and the result is returned."""
    target, seed = memory.buffers[request.writes[0]], int(request.arguments[0])
    target[:] = np.random.default_rng(None if seed < 0 else seed).standard_normal(len(target))
    return target.tobytes() if seed < 0 else b""


Operation = Callable[[DeviceMemory, DeviceRequest, bytes], bytes | None]
OPERATIONS: dict[str, Operation] = {
    "allocate": _allocate, "free": _free, "write": _write, "read": _read, "digest": _digest, "copy": _copy,
    "fill": _fill, "add": _add, "multiply": _multiply, "scale": _scale, "matmul": _matmul, "normal": _normal,
}  # fmt: skip


def digest_of(contents: list[bytes]) -> bytes:
    """Return a digest of buffers' contents, in their order."""
    return struct.pack(f"<{len(contents)}I", *map(crc32c, contents))


class _Gone(Exception):
    """The process of this device's owner is gone."""


class _Server:
    def __init__(self, link: socket.socket) -> None:
        self._link, self._parent = link, os.getppid()
        self._memory = DeviceMemory()
        self._decode = msgspec.msgpack.Decoder(DeviceRequest).decode
        self._failed = False

    def serve(self) -> None:
        while True:
            (length,) = LENGTH.unpack(self._receive(LENGTH.size))
            request = self._decode(self._receive(length))
            data = self._receive(request.data_bytes)
            if self._failed:
                continue  # what follows depends on what was not done
            answer, error = b"", ""
            try:
                answer = self._memory.do(request, data)
            except (KeyError, ValueError, TypeError, MemoryError, IndexError, ArithmeticError) as failure:
                self._failed, error = True, f"{type(failure).__name__}: {failure}"
            header = msgspec.msgpack.encode(DeviceReply(request.ticket, request.number, error, len(answer)))
            self._link.sendall(LENGTH.pack(len(header)) + header + answer)

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            while not select.select([self._link], [], [], _LOOK_S)[0]:
                if os.getppid() != self._parent:  # its other children may still hold the other end
                    raise _Gone
            count = self._link.recv_into(view)
            if not count:
                raise _Gone
            view = view[count:]
        return bytes(data)


def main() -> None:
    """Be a device until the other end of standard input is closed."""
    helper_process.begin("device", outlives_parent=True, is_urgent=True)
    link = socket.socket(fileno=0)
    link.setblocking(True)
    with contextlib.suppress(_Gone, ConnectionError):
        _Server(link).serve()
