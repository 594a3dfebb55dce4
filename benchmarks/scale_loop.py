"""A loop over thousands of ZeroMQ sockets: epoll on their descriptors, and timers. For simulated agents.

``zmq_poll`` looks at every socket on each call, which with thousands would measure the client and not the controller.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable
from typing import Any

import zmq

EVENTS_PER_TURN = 512


class Loop:
    """``watch`` sockets, call things ``later``, and ``turn``."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._drains: dict[int, Callable[[], None]] = {}
        self._stirred: set[int] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def watch(self, socket: zmq.Socket[Any], drain: Callable[[], None]) -> int:
        """``drain`` must take all that there is, since a descriptor tells of new commands and not of messages."""
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return self.watch_fd(fd, drain)

    def watch_fd(self, fd: int, drain: Callable[[], None]) -> int:
        self._drains[fd] = drain
        self._epoll.register(fd, select.EPOLLIN)
        self._stirred.add(fd)
        return fd

    def forget(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._drains[fd]
        self._stirred.discard(fd)

    def stirred(self, fd: int) -> None:
        """Look again: a send may have taken the descriptor's signal for a message that has come."""
        self._stirred.add(fd)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), what))

    def turn(self, limit_s: float = 0.1) -> None:
        """Wait for something to do, and do it."""
        due = self._timers[0][0] - time.monotonic() if self._timers else limit_s
        wait_s = 0.0 if self._stirred else max(0.0, min(limit_s, due))
        stirred, self._stirred = self._stirred, set()
        for fd in stirred | {fd for fd, _ in self._epoll.poll(wait_s, EVENTS_PER_TURN)}:
            drain = self._drains.get(fd)
            if drain is not None:
                drain()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
