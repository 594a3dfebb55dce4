"""``FILE.py:NAME``: a user's function that makes a torch module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable


def is_module(text: str | None) -> bool:
    """Return whether MODEL is of this form."""
    file, _, name = (text or "").rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def function_of(place: str) -> Callable[[], Any]:
    """Return the function. Raises UsageError."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not name.isidentifier() or path.suffix != ".py":
        raise UsageError(f"--module {printable(place)}: it is FILE.py:NAME")
    if not path.is_file():
        raise UsageError(f"--module: there is no file {printable(file)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pytrees of the file look it up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--module: {path} does not run: {type(error).__name__}: {printable(str(error))}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"--module: {path} has no function {name}")
    return found  # type: ignore[no-any-return]
