"""A function that is entered again in the living process when its ranks cannot go on (NVX-3).

The launcher ends the round: what the training thread waits for is broken, and it leaves the function by ``RoundOver``.
The process keeps what it has imported, opened and warmed up. It takes its place in the next round by message, and the
function is called again. A rank that does not leave in time is ended and started again, as others are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.core import gloo_groups, stack_dump
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.rank_error import end_of, write_error
from resilio_hpc.core.rank_link import (
    STANDBY_VARIABLE,
    CanReenter,
    EnterRound,
    LeaveRound,
    LeavingRound,
    LeftRound,
    Raised,
)
from resilio_hpc.native import intercept
from resilio_hpc.train import broken_communication
from resilio_hpc.train.last_step import is_of_a_lost_peer
from resilio_hpc.train.run import Run, attach

P = ParamSpec("P")
T = TypeVar("T")

_SIGNAL = signal.SIGURG  # nothing is done at it by default, and few programs use it
_AGAIN_S = 0.05
_MOST_TEXT = 10_000  # characters, of which some take four bytes of a packet
_MAKING_S = 0.3
_STUCK_S = 1.0


class RoundOver(BaseException):
    """Raised in the training thread when its ranks cannot go on. ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__("the ranks cannot go on; the next round follows")


def restartable(function: Callable[P, T]) -> Callable[P, T]:
    """Have ``function`` entered again, in this process, when ranks cannot go on: ``@train.restartable``.

    It makes its process groups itself, and what uses them, such as DDP; it restores, and trains. What is made outside,
    such as a model and its optimizer, is kept; ``Checkpointer.restore`` brings it to the step that all ranks go on
    from. ``train.attach()`` returns the same Run, with the place in the new round. Without resilio-launch, or outside
    of the main thread, it is called once, as usual.
    """

    @functools.wraps(function)
    def enter(*arguments: P.args, **options: P.kwargs) -> T:
        reentry = _reentry_of(attach())
        if reentry is None:
            return function(*arguments, **options)
        return reentry.run(lambda: function(*arguments, **options))

    return enter


def _reentry_of(run: Run) -> Reentry | None:
    """Return what can enter again; None without the launcher, or where the thread or the signal is not to be had."""
    if run._link is None or threading.current_thread() is not threading.main_thread():
        return None
    if not _reentries and signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return None
    if not _reentries:
        _reentries.append(Reentry(run))
    return _reentries[0] if _reentries[0].is_outside else None


class Reentry:
    """One process's way from round to round."""

    def __init__(self, run: Run) -> None:
        """Take the agent's words."""
        link = run._link
        assert link is not None
        self._link = link
        self._changed = threading.Condition()
        self._ordered_at: float | None = None
        self._next: EnterRound | None = None
        self._is_lost = False
        self._outside = threading.Event()  # the function does not run
        self._outside.set()
        self._interrupter: threading.Thread | None = None
        link.subscribe(LeaveRound, self._on_leave)
        link.subscribe(EnterRound, self._on_enter)
        link.on_close(self._on_lost)
        signal.signal(_SIGNAL, self._on_signal)

    @property
    def is_outside(self) -> bool:
        """Return whether the function does not run."""
        return self._outside.is_set()

    def run(self, call: Callable[[], T]) -> T:
        """Call it until it returns, or ends with an error after which this process cannot go on."""
        hook = sys.excepthook
        if STANDBY_VARIABLE in os.environ:
            self._link.send(CanReenter())
            self._enter()
        gc.freeze()  # what is there stays: each new entry looks for what the one before has left
        while True:
            self._link.send(CanReenter())
            try:
                return self._attempt(call)
            except RoundOver as over:
                _, handler = end_of(over)
            except Exception as error:
                root, handler = end_of(error)
                if not isinstance(root, Exception) or not self._waits_after(root):
                    raise
                traceback.clear_frames(error.__traceback__)
                del root
            self._leave()
            sys.excepthook = hook  # torch sets one more around it with each first process group
            self._enter()
            if handler is not None:
                signal.signal(signal.SIGCHLD, handler)

    def _attempt(self, call: Callable[[], T]) -> T:
        self._outside.clear()
        try:
            with self._changed:
                is_over = self._ordered_at is not None
            if is_over:
                raise RoundOver
            return self._inside(call)
        finally:
            self._outside.set()

    def _inside(self, call: Callable[[], T]) -> T:
        return call()  # the signal raises here, or further inside

    # -- the agent's words ---------------------------------------------------------------------------------------

    def _on_leave(self, _: LeaveRound) -> None:
        with self._changed:
            if self._ordered_at is not None:
                return
            self._ordered_at = time.monotonic()
            self._interrupter = threading.Thread(target=self._interrupt, name="resilio-leave", daemon=True)
            self._interrupter.start()
            self._changed.notify_all()
        self._link.send(LeavingRound())

    def _on_enter(self, message: EnterRound) -> None:
        with self._changed:
            self._next = message
            self._changed.notify_all()

    def _on_lost(self) -> None:
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def _interrupt(self) -> None:
        """Wake the training thread until it has left the function: it may wait in a library, or in the kernel."""
        training = threading.main_thread().ident
        assert training is not None
        begun = time.monotonic()
        while not self._outside.is_set():
            with contextlib.suppress(Exception):  # the training thread may destroy groups meanwhile
                broken_communication.break_all(os.environ)
            signal.pthread_kill(training, _SIGNAL)
            self._outside.wait(_AGAIN_S)
            waited_s = time.monotonic() - begun
            # it waits for the connection of a peer that is gone, which nothing ends, or, seldom, in a collective whose
            # connections were all shut down: a new process is there sooner
            if (gloo_groups.is_making() and waited_s > _MAKING_S) or (
                waited_s > _STUCK_S and broken_communication.waits_in_gloo(training)
            ):
                os._exit(1)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if self._ordered_at is None:
            return
        while frame is not None:
            if frame.f_code is Reentry._inside.__code__:
                raise RoundOver
            frame = frame.f_back

    # -- from round to round -------------------------------------------------------------------------------------

    def _waits_after(self, error: Exception) -> bool:
        """Tell the agent of an error, and wait for its word. Return whether the next round may be entered."""
        text = str(error)
        if DEVICES.ends_process(error):
            return False
        if self._ordered_at is not None:
            return True  # what the round's end has broken
        attach().give_up_step()
        error.__traceback__ = _user_frames(error.__traceback__)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            write_error(Path(path), error)  # first: the console looks there whether the traceback is news
        shown = "".join(traceback.format_exception(error))
        print(shown, file=sys.stderr, end="", flush=True)
        self._link.send(Raised(f"{type(error).__name__}: {text}"[:2000], shown[-_MOST_TEXT:], time.time()))
        if not is_of_a_lost_peer(error):
            attach().save_finished_step()
        with self._changed:
            self._changed.wait_for(lambda: self._ordered_at is not None or self._is_lost)
            return self._ordered_at is not None

    def _leave(self) -> None:
        """Leave what the round had, and say so. What is freed after that, others need not wait for."""
        with self._changed:
            interrupter, self._interrupter = self._interrupter, None
        if interrupter is not None:
            interrupter.join()
        broken_communication.break_all(os.environ)
        broken_communication.leave_groups()
        _bring_devices_back()
        gc.collect()
        self._link.send(LeftRound(round(time.monotonic() - (self._ordered_at or 0.0), 4)))
        gloo_groups.free()
        _give_back_memory()

    def _enter(self) -> None:
        """Wait for the next round, and take this process's place in it."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._is_lost)
            message, self._next, self._ordered_at = self._next, None, None
        if message is None:
            sys.exit(1)  # the agent is gone
        for stream, path in ((1, message.stdout_path), (2, message.stderr_path)):
            _continue_in(stream, path)
        before = os.environ.get(intercept.CALLS_VARIABLE, "")
        os.environ.pop(STANDBY_VARIABLE, None)
        os.environ.update(message.variables)
        intercept.begin_round(before, os.environ.get(intercept.CALLS_VARIABLE, ""))
        stack_dump.write_when_asked()
        self._link.enter(os.environ)
        gc.collect()  # the state of the round before, where the function had made it


_reentries: list[Reentry] = []


def _bring_devices_back() -> None:
    """Bring back what devices have lost. Where that cannot be, this process ends, and a new one takes its place."""
    try:
        DEVICES.rebuild()
    except ResilioError as error:
        print(f"resilio: this process ends: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _user_frames(shown: TracebackType | None) -> TracebackType | None:
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    return shown


def _give_back_memory() -> None:
    """Return what was freed to the kernel: glibc keeps more and more of it over many rounds, in pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _continue_in(stream: int, path: str) -> None:
    """Write this output into another file from here on."""
    (sys.stdout if stream == 1 else sys.stderr).flush()
    try:
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        print(f"resilio: output goes on in the file of the round before: {error}", file=sys.stderr)
        return
    os.dup2(opened, stream)
    os.close(opened)
