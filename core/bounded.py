"""Calls that may hang with their disk or file system: each runs in its own thread, with a bounded wait.

Nothing ends a thread that waits in the kernel. Its caller goes on without it; if the call returns later, the thread
ends.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")
Waiter = Callable[[Sequence[Future[Any]], float], object]
"""Returns when the futures are done, or after so many seconds."""


def begin(act: Callable[[], Result]) -> Future[Result]:
    """Start ``act`` in a thread that does not keep the process alive; the future gets its result or exception."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - the caller that waits gets it
            future.set_exception(error)

    threading.Thread(target=run, name="resilio-bounded", daemon=True).start()
    return future


def in_time(act: Callable[[], Result], seconds: float, wait: Waiter = wait) -> Result:
    """Return or raise what ``act`` does; TimeoutError (an OSError) where it takes longer."""
    future = begin(act)
    wait([future], seconds)
    if not future.done():
        raise no_answer(seconds)
    return future.result()


def no_answer(seconds: float) -> TimeoutError:
    """Return the error for a disk that does not answer."""
    return TimeoutError(errno.ETIMEDOUT, f"it has not answered for {seconds:g} s")
