"""This process's connection to its saver: a process of its own, or a thread of this one where none can be started.

All Checkpointers share one. While it works for another of them, one more is started, so a file system that hangs stops
no save to another one. A saver that dies is replaced. A forked child (a DataLoader's worker) has none before it saves:
its parent's saver does not know it, and ends with the parent even if the child lives on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.ckpt.saver import local_saver
from resilio_hpc.ckpt.saver.local_saver import READY, Save, receive
from resilio_hpc.ckpt.saver.messages import Answer, Progress, SaverFailed, decode_answer
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.core import interpreter
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.core.standard_streams import say

_END_S = 5.0
_NEVER = threading.Event()


def start() -> None:
    """Start a process before it is needed: its imports take a while."""
    if not _idle and (child := _new()) is not None:
        _idle.append(child)


def ask(request: Save, arena: Path) -> Asked:
    """Send a request; on return it will be carried out, whatever happens to this process.

    Unless this process itself has to do it. Call the result in a thread: it waits for the answer. Raises OSError when
    the arena cannot be sent.
    """
    descriptor = os.open(arena, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while (child := _idle.pop() if _idle else _new()) is not None:
            if child.send(request, descriptor):
                return Asked(request, arena, child)
            _end_of(child)  # it had died before
        return Asked(request, arena, None)
    finally:
        os.close(descriptor)


class Asked:
    """A request on its way."""

    def __init__(self, request: Save, arena: Path, child: _Child | None) -> None:
        self._request, self._arena, self._child = request, arena, child

    def __call__(self, heard: Callable[[Progress], None]) -> Answer:
        """Wait for the answer; ``heard`` is called with the messages before it."""
        child, request = self._child, self._request
        if child is None:
            return _save_here(request, self._arena, heard)
        answer = child.answer(heard)
        if answer is not None:
            _idle.append(child)
            return answer
        how = _end_of(child)
        if not child.was_ready:
            return _save_here(request, self._arena, heard)
        why = f"the process that was writing it {how}; another one is started for the next save"
        local_saver.note_failure(request, why)
        return SaverFailed(request.step, why)

    def cancel(self) -> None:
        """Cancel by killing the child: no thread will wait for the answer."""
        if self._child is not None:
            self._child.end()


def _save_here(request: Save, arena: Path, heard: Callable[[Progress], None]) -> Answer:
    if request.rank == 0:
        checkpoint_index.remove_recycled_at_exit(Path(request.directory))
    return local_saver.save(request, str(arena), _NEVER, heard)


def _end_of(child: _Child) -> str:
    """Return how a dead child ended. If it never was ready, another would not be, either."""
    child.answer(lambda progress: None)
    how = child.end(_END_S)
    if not child.was_ready:
        _use_threads(f"it {how} as soon as it was started")
    return how


def _new() -> _Child | None:
    if _threads_only.is_set():
        return None
    try:
        return _Child()
    except OSError as error:
        _use_threads(error.strerror or str(error))
        return None


def _use_threads(why: str) -> None:
    if not _threads_only.is_set():
        _threads_only.set()
        text = f"no process of its own can write checkpoints ({why}): a thread of this one does from here on"
        say(text)


class _Child:
    """One child process. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _children.add(self)
        self._idle = threading.Event()
        self._idle.set()
        self.was_ready = False
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-c", interpreter.source("ckpt.saver.local_saver")),
                stdin=theirs.fileno(), stdout=theirs.fileno(), env=_environment(), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        self._close = weakref.finalize(self, _close, self._process, self._link, self._idle)

    def send(self, request: Save, arena: int) -> bool:
        """Send a request; return False when the process is dead."""
        self._idle.clear()
        try:
            socket.send_fds(self._link, [encode_line(request)], [arena])
        except OSError:
            self._idle.set()
            return False
        return True

    def answer(self, heard: Callable[[Progress], None]) -> Answer | None:
        """Wait for the answer to the last request; None when there will be none."""
        while packet := receive(self._link)[0]:
            if packet == READY:
                self.was_ready = True
                continue
            word = decode_answer(packet)
            if isinstance(word, Progress):
                heard(word)
                continue
            self._idle.set()
            return word
        return None

    def end(self, patience_s: float = 0.0) -> str:
        """End the child and return how it ended; it is killed after ``patience_s``."""
        self._close.detach()
        self._link.close()
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (is memory short?)"
        return f"was killed by signal {-code}"

    def forget(self) -> None:
        """Close the socket, in a forked child: only the parent may hold it.

        Its end tells that the parent is dead.
        """
        self._link.close()
        if hasattr(self, "_close"):
            self._close.detach()
            self._process.returncode = 0  # it is another process's child


def _close(process: subprocess.Popen[bytes], link: socket.socket, idle: threading.Event) -> None:
    """Close the link: no process saves any more, or this interpreter ends.

    The child finishes its requests and then ends.
    """
    link.close()
    if idle.is_set():
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _environment() -> dict[str, str]:
    """Return the child's environment: it imports like this process, without threads of MPI and linear algebra."""
    path = [*(str(Path(place).absolute()) for place in sys.path if place), interpreter.PACKAGE_PARENT]
    own = {"PYTHONPATH": os.pathsep.join(path), "MPI4PY_RC_INITIALIZE": "false", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **own}


def _forget_all() -> None:
    _idle.clear()
    for child in list(_children):
        child.forget()


_idle: list[_Child] = []
_children: weakref.WeakSet[_Child] = weakref.WeakSet()
_threads_only = threading.Event()
os.register_at_fork(after_in_child=_forget_all)
