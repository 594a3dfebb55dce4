"""A rank's side of the link to its agent (messages: ``resilio_hpc.core.rank_link``), and the coordinator over it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakMethod

from resilio_hpc.ckpt.coordination import fresh_start
from resilio_hpc.ckpt.coordination.coordinator import (
    ARRIVING,
    READ_AHEAD_VARIABLE,
    ROUND_OVER,
    OnStage,
    Place,
    local_directory,
    peer_disks_file,
)
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core import collector_time, rank_link
from resilio_hpc.core.errors import UsageError, WireError
from resilio_hpc.core.tiers import Stage, Tier

EXIT_RESTORE_FAILED = 98
"""Exit code of a rank whose restore point turned out bad; the controller chooses another."""

_STEP_DONE_INTERVAL_S = 0.05
_LOOK_S = 0.01

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
    """A rank's connection to its agent (messages: ``resilio_hpc.core.rank_link``), and the coordinator that uses it.

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
                print(f"resilio: ignored a message of the agent: {error}", file=sys.stderr)
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


def parse_restore_point(text: str) -> RestorePoint | None:
    """Return the restore point in $RESILIO_RESTORE.

    It is "", "memory:<step>" ("arriving:<step>" while it is on its way), or "committed:<step>". Raises UsageError.
    """
    if not text:
        return None
    source, _, step = text.partition(":")
    if step.isdecimal() and source in (Tier.MEMORY, ARRIVING):
        return RestorePoint(Tier.MEMORY, int(step))
    if step.isdecimal() and source == Tier.COMMITTED:
        return RestorePoint(Tier.COMMITTED, int(step))
    raise UsageError(f"RESILIO_RESTORE={text!r} is not memory:STEP, {ARRIVING}:STEP or committed:STEP")


class AgentCoordinator:
    """Coordinator under resilio-launch: the controller decides, the agent's saver writes."""

    def __init__(self, link: AgentLink, environment: Mapping[str, str]) -> None:
        arenas = environment.get("RESILIO_ARENA_DIR")
        self.arena_directory = Path(arenas) if arenas else None
        self.local_directory = local_directory(None, environment)
        self.peer_disks = peer_disks_file(environment)
        begun = environment.get(READ_AHEAD_VARIABLE)
        self.read_ahead = Path(begun) if begun else None
        self._directory = environment.get("RESILIO_CHECKPOINT_DIR")
        self._link = link
        self._saved: set[int] = set()
        self._callbacks: list[OnStage] = []
        self._take_round(environment)
        link.subscribe(rank_link.SaveProgress, self._on_progress)
        link.on_close(self._on_close)
        link.on_enter(self._enter)

    def _take_round(self, environment: Mapping[str, str]) -> None:
        """Take this rank's place in a round, and what it restores."""
        self.place = self._link.place
        text = environment.get("RESILIO_RESTORE", "")
        self._point = parse_restore_point(text)
        self._arrives = self._point is not None and text.startswith(ARRIVING)
        in_memory = self._point is not None and self._point.source is Tier.MEMORY and not self._arrives
        self.memory_step = self._point.step if self._point is not None and in_memory else -1

    def _enter(self, environment: Mapping[str, str]) -> None:
        self._saved.clear()
        self._tell(-1, Stage.FAILED, ROUND_OVER)
        self._take_round(environment)

    def await_arenas(self) -> None:
        """Wait until the snapshot is whole. If it never will be, the agent says so, and all ranks are ended."""
        while self._arrives and self._link.usable:
            if self._is_here():
                self._arrives = False
            else:
                time.sleep(_LOOK_S)

    def _is_here(self) -> bool:
        if self.arena_directory is None or self._point is None:
            return True
        slots = (arena.slot_path(self.arena_directory, self.place.rank, number) for number in (0, 1, arena.LAST))
        held = (arena.read_header(path) for path in slots)
        return any(header is not None and header.step == self._point.step for header in held)

    def restore_points(self) -> Sequence[RestorePoint]:
        """Return the one that all ranks of this round restore; later on, what they saved and committed last.

        Raises CorruptCheckpoint when there is none because all are damaged.
        """
        if self.place.rank == 0 and self._directory:
            directory, point = Path(self._directory), self._point
            if point is None:
                fresh_start.check_not_all_damaged(directory)
            elif point.source is Tier.COMMITTED and (why := fresh_start.why_newest_is_gone(directory)):
                print(f"resilio: {why}: going on from step {point.step}", file=sys.stderr)
        return [] if self._point is None else [self._point]

    def restored(self, step: int, source: Tier | None, seconds: float) -> None:
        """Tell the agent which step was restored."""
        self._link.send(rank_link.Restored(step, source, seconds))

    def restore_failed(self, point: RestorePoint, error: str) -> None:
        """Tell the agent and end this process: all ranks must restore the same other copy, so a new round begins.

        It ends at once and without clean-up: the other ranks may already be waiting for it in a collective.
        """
        self._link.send(rank_link.RestoreFailed(point.step, point.source, error[:2000]))
        print(f"resilio: rank {self.place.rank}: {point.source} copy of step {point.step}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_RESTORE_FAILED)

    def before_save(self, step: int) -> None:
        """Do nothing: the two arenas are the only limit."""

    def snapshot_taken(self, step: int, arena: Path, size_bytes: int, blocked_s: float) -> None:
        """Tell the agent about the snapshot."""
        self._saved.add(step)
        self._link.send(rank_link.SnapshotTaken(step, str(arena), size_bytes, blocked_s))

    def on_stage(self, callback: OnStage) -> None:
        """Call ``callback`` for the agent's Stage messages; the end of the agent or the round fails every open save."""
        self._callbacks.append(callback)
        if not self._link.usable:
            self._on_close()

    def _on_progress(self, stage: rank_link.SaveProgress) -> None:
        if stage.stage is Stage.COMMITTED and stage.step in self._saved:
            self._saved.discard(stage.step)
            self._point, self._arrives = RestorePoint(Tier.COMMITTED, stage.step), False
        self._tell(stage.step, stage.stage, stage.error)

    def _on_close(self) -> None:
        self._tell(-1, Stage.FAILED, "the agent of this node is gone")

    def _tell(self, step: int, stage: Stage, error: str) -> None:
        for callback in self._callbacks:
            callback(step, stage, error)
