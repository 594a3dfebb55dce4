"""A rank's side of the link to its agent (messages: ``resilio_hpc.core.rank_link``)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakMethod

from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.core import collector_time, rank_link
from resilio_hpc.core.errors import WireError
from resilio_hpc.core.standard_streams import say

_STEP_DONE_INTERVAL_S = 0.05

Message = TypeVar(
    "Message",
    rank_link.StopAt, rank_link.StopConfirmed, rank_link.PauseConfirmed, rank_link.Resume, rank_link.SaveProgress,
    rank_link.SaveLastStep, rank_link.SaveAt, rank_link.LeaveRound, rank_link.EnterRound,
)  # fmt: skip
Callback = Callable[..., Any]


def _strong(callback: Callback) -> Callable[[], Callback | None]:
    return lambda: callback


def _weak(held: Callable[[], Callback | None]) -> Callable[[], Callback | None]:
    """Return what gives the callback as long as its object lives."""
    callback = held()
    is_method = not isinstance(held, WeakMethod) and isinstance(callback, MethodType)
    return WeakMethod(callback) if is_method and callback is not None else held


class AgentLink:
    """A rank's connection to its agent (messages: ``resilio_hpc.core.rank_link``).

    When the agent is gone, sending does nothing: the agent's end is the end of its ranks anyway. In a forked child
    (a DataLoader's worker) everything does nothing: the connection belongs to the rank.
    """

    def __init__(self, link: socket.socket, place: Place) -> None:
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size
        self._link = link
        self._pid = os.getpid()
        self._send_lock = threading.Lock()
        self._subscribers: dict[type, list[Callable[[], Callback | None]]] = defaultdict(list)
        self._on_close: list[Callable[[], Callback | None]] = []
        self._on_enter: list[Callable[[], Callback | None]] = []
        self._closed = False
        self._last_step_done = -float("inf")
        collector_time.begin()
        self.report_every_step = False
        """Set while a stop or a pause is pending: then the agent must see every step."""
        self.send(rank_link.Attach(place.rank, place.local_rank, place.round, self._pid))
        threading.Thread(target=self._listen, name="resilio-agent-link", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Return whether the agent is still there, and this is the process that it knows."""
        return not self._closed and os.getpid() == self._pid

    def send(self, message: rank_link.RankMessage) -> None:
        """Send one message; do nothing when the agent is gone."""
        if not self.usable:
            return
        packet = rank_link.to_agent.encode(message)
        try:
            with self._send_lock:
                self._link.send(packet, socket.MSG_NOSIGNAL)
        except OSError:
            self._close()

    def offer(self, message: rank_link.RankMessage) -> None:
        """Send one message, or drop it where that would wait: the agent is behind, or another thread sends."""
        if not self.usable or not self._send_lock.acquire(blocking=False):
            return
        try:
            self._link.send(rank_link.to_agent.encode(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:  # full, or too long; a link that is broken is noticed by the next message
            pass
        finally:
            self._send_lock.release()

    def step_done(self, step: int) -> None:
        """Report a finished step, at most twenty times a second."""
        now = time.monotonic()
        if self.report_every_step or now - self._last_step_done >= _STEP_DONE_INTERVAL_S:
            self._last_step_done = now
            self.send(rank_link.StepDone(step, time.time(), round(collector_time.seconds(), 4)))

    def subscribe(self, kind: type[Message], callback: Callable[[Message], None]) -> None:
        """Call ``callback``, in the listening thread, with every message of that type."""
        self._subscribers[kind].append(_strong(callback))

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the agent is gone (at once if it is already)."""
        self._on_close.append(_strong(callback))
        if self._closed:
            callback()

    def on_enter(self, callback: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``callback``, with the environment, when this process enters another round."""
        self._on_enter.append(_strong(callback))

    def enter(self, environment: Mapping[str, str]) -> None:
        """Enter another round in this process.

        What subscribed in rounds before is called only as long as another object holds it.
        """
        for found in (self._on_close, self._on_enter, *self._subscribers.values()):
            found[:] = [held for held in map(_weak, found) if held() is not None]
        place = self.place = Place.read(environment)
        self.rank, self.world_size = place.rank, place.world_size
        self.report_every_step = False
        self._last_step_done = -float("inf")
        self.send(rank_link.Attach(place.rank, place.local_rank, place.round, self._pid))
        _call(self._on_enter, environment)

    def _listen(self) -> None:
        while True:
            try:
                packet = self._link.recv(rank_link.MAX_BYTES)
            except OSError:
                packet = b""
            if not packet:
                self._close()
                with self._send_lock:
                    self._link.close()
                return
            try:
                message = rank_link.to_rank.decode(packet)
            except WireError as error:
                say(f"ignored a message of the agent: {error}")
                continue
            if isinstance(message, rank_link.StopAt | rank_link.Resume):
                self.report_every_step = isinstance(message, rank_link.StopAt)
            _call(self._subscribers[type(message)], message)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # wakes the listening thread, which closes the socket
        _call(self._on_close)


def _call(held: list[Callable[[], Callback | None]], *arguments: Any) -> None:
    for one in list(held):
        callback = one()
        if callback is not None:
            callback(*arguments)


_link: AgentLink | None = None
_link_lock = threading.Lock()


def current(environment: Mapping[str, str] = os.environ) -> AgentLink | None:
    """Return this process's link, connected at the first call.

    None without resilio-launch, or in a forked child.
    """
    global _link
    with _link_lock:
        if _link is not None:
            return _link if _link.usable else None
        link = rank_link.connect(environment)
        if link is not None:
            _link = AgentLink(link, Place.read(environment))
        return _link
