"""The result of the readers of other programs' formats, and the libraries that they need."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resilio_hpc.ckpt.state.tensors import Leaf
from resilio_hpc.core.errors import UsageError

_INSTALL = {
    "torch": "pip install torch",
    "h5py": "pip install h5py",
    "safetensors": "pip install 'resilio_hpc[safetensors]'",
}


@dataclass(frozen=True)
class Imported:
    """A nested state. Its tensors are mapped from the file, or are placeholders for those that ``fetch`` reads."""

    state: Any
    fetch: Callable[[Leaf], Any] | None = None


def library(name: str, purpose: str) -> Any:
    """Return an optional library. Raises UsageError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{purpose} needs {name}: {_INSTALL[name]}") from error
