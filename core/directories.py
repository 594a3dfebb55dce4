"""Directories named by users: unusable ones are refused in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

from resilio_hpc.core.errors import UsageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def directory_path(given: str | os.PathLike[str], name: str) -> Path:
    """Return the absolute path of a directory.

    ``name``: its name in messages, such as an argument or a variable. Raises UsageError for a URL, which would become a
    local folder of that name, for an empty name, for one with a NUL, and for one that is not UTF-8, which the JSON in
    files and messages could not hold.
    """
    try:
        text = os.fspath(given)
    except TypeError:
        text = given  # type: ignore[assignment]
    if not isinstance(text, str):
        raise UsageError(f"{name} is the path of a directory, not {given!r}")
    if not text or "\0" in text:
        raise UsageError(f"{name} is {text!r}, not the path of a directory")
    if _URL.match(text):
        raise UsageError(
            f"{name} is {text}: it must be a directory of a file system; mount what is behind that URL, and give the "
            "path"
        )
    path = Path(text).absolute()
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{name} is {str(path)!r}, whose name is not UTF-8: choose another, or rename it") from None
    return path
