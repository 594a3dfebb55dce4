"""A rank's own report of the error that ends it: torchrun's error file, which $TORCHELASTIC_ERROR_FILE names.

``rank_main`` loads this file by its path, also where this package may not be installed: it imports nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

MAX_MESSAGE = 4000  # characters that are kept
MAX_TRACEBACK = 64 * 1024
Handler = Callable[[int, "FrameType | None"], object]
_CHILD_S = 2.0  # from the end of a child's connections to its own; on a machine without load a millisecond
_UNSAFE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")  # control characters, escapes, surrogates


def clean(text: str, limit: int) -> str:
    """Return what an error file holds of a text: at most ``limit`` characters of it."""
    cut = text if len(text) <= limit else text[: limit // 2] + "\n…\n" + text[-limit // 2 :]
    return without_controls(cut.replace("\r\n", "\n"))


def without_controls(text: str) -> str:
    """Return the text as an error file keeps it: control characters and surrogates become ``?``."""
    return _UNSAFE.sub("?", text)


def write_error(path: Path, error: BaseException, *, overwrite: bool = False) -> None:
    """Record an uncaught exception as ``record`` would, unless the script did so itself. Never raises."""
    try:
        if not overwrite and path.exists() and path.stat().st_size > 0:
            return
        message = {
            "message": clean(f"{type(error).__name__}: {error}", MAX_MESSAGE),
            "extraInfo": {
                "py_callstack": clean("".join(traceback.format_exception(error)), MAX_TRACEBACK),
                "timestamp": str(int(time.time())),
            },
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"message": message}), encoding="utf-8")
        temporary.replace(path)
    except Exception:  # noqa: BLE001  the process is dying of ``error``: that, not our trouble, must be its end
        return


def end_of(error: BaseException) -> tuple[BaseException, Handler | None]:
    """Return the error behind this one, and the program's handler for the ends of children, which is not called again.

    torch's handler raises an error wherever the main thread is, once: it would break the report of the one before it.
    """
    said: BaseException = error
    before: Handler | None = None
    for _ in range(3):
        try:
            handler = signal.getsignal(signal.SIGCHLD)
            if callable(handler):
                before = handler
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _root_of(error, said), before
        except Exception as found:  # noqa: BLE001 - the handler's own
            said = found
    return error, before


def _root_of(error: BaseException, said: BaseException) -> BaseException:
    """Return torch's account of a data loader's worker that was killed, where the program met what followed from it.

    Which of the two comes first is chance: a connection that the worker has left, or the signal of its end. ``said``:
    what the handler has raised meanwhile; ``error`` itself where that is nothing.
    """
    loaders = sys.modules.get("torch.utils.data._utils.signal_handling")
    look = getattr(loaders, "_error_if_any_worker_fails", None)
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    lost = isinstance(error, (ConnectionError, EOFError)) and any("/torch/utils/data/" in file for file in files)
    until = time.monotonic() + (_CHILD_S if lost else 0.0)
    while look is not None and said is error:
        try:
            look()
        except RuntimeError as found:
            said = found
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    if not isinstance(error, Exception) or str(said) == str(error) or not str(said).startswith("DataLoader worker"):
        return error
    said.__cause__ = error
    return said.with_traceback(error.__traceback__)
