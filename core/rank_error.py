"""A rank's own report of the error that ends it: torchrun's error file, which $TORCHELASTIC_ERROR_FILE names."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from pathlib import Path

MAX_MESSAGE = 4000  # characters that are kept
MAX_TRACEBACK = 64 * 1024
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
