"""How much the kernel holds back for the network devices of this node: a device that sends too slowly has a queue.

Asked of the kernel by rtnetlink (RTM_GETQDISC), whose answer needs no rights. A device without a queue, as most virtual
ones, counts as 0; so does everything where the kernel does not answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_RTM_NEWQDISC, _RTM_GETQDISC = 36, 38
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_STATS2, _QUEUE = 7, 3  # TCA_STATS2, and TCA_STATS_QUEUE in it
_NESTED = 0x3FFF  # the bits of an attribute's type that are not flags
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_TCMSG = struct.Struct("=BxxxiIII")  # family, index of the device, handle, parent, info
_BACKLOG = struct.Struct("=II")  # packets, bytes
_LOOPBACK = 1  # its index in every network namespace
TIME_LIMIT_S = 0.2
_MOST_ANSWERS = 64  # of up to 64 KiB


def backlog() -> int:
    """Return the bytes that wait in the longest queue of a network device, loopback left out; 0 where unknown."""
    return max((queued for device, queued in _ask() if device != _LOOPBACK), default=0)


def read_answer(data: bytes) -> tuple[list[tuple[int, int]], bool]:
    """Return index and bytes of each device's queue that a datagram names, and whether it was the last one."""
    found: list[tuple[int, int]] = []
    for kind, body in _messages(data):
        if kind in {_NLMSG_DONE, _NLMSG_ERROR}:
            return found, True
        if kind != _RTM_NEWQDISC or len(body) < _TCMSG.size:
            continue
        _, device, *_ = _TCMSG.unpack_from(body)
        for name, value in _attributes(body[_TCMSG.size :]):
            if name == _STATS2:
                found += [
                    (device, _BACKLOG.unpack_from(queue)[1])
                    for part, queue in _attributes(value) if part == _QUEUE and len(queue) >= _BACKLOG.size
                ]  # fmt: skip
    return found, False


def _ask() -> list[tuple[int, int]]:
    request = _HEADER.pack(_HEADER.size + _TCMSG.size, _RTM_GETQDISC, _REQUEST | _DUMP, 1, 0)
    found: list[tuple[int, int]] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(TIME_LIMIT_S)
            kernel.send(request + _TCMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
            for _ in range(_MOST_ANSWERS):
                queues, is_last = read_answer(kernel.recv(1 << 16))
                found += queues
                if is_last:
                    break
    except OSError:
        return found
    return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if length < _HEADER.size or length > len(data):
            return
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, name = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size or length > len(data):
            return
        yield name & _NESTED, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
