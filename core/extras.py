"""Packages that a plain install leaves out, and how to get each."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from resilio_hpc.core.errors import UsageError

_EXTRAS = {
    "torch": "torch", "mpi4py": "mpi", "submitit": "submitit", "pynvml": "gpu", "safetensors": "safetensors",
    "prometheus_client": "metrics", "shtab": "site",
}  # fmt: skip
"""The extra of resilio_hpc that brings each package, by the name under which it is imported."""


def how_to_get(name: str) -> str:
    """Return the command that installs an optional package, or "" for another one."""
    extra = _EXTRAS.get(name.partition(".")[0], "")
    return f"pip install 'resilio_hpc[{extra}]'" if extra else ""


def library(name: str, purpose: str) -> Any:
    """Return the imported package. Raises UsageError, which names the purpose, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _needed(name, purpose) from error


def require(name: str, purpose: str) -> None:
    """Raise UsageError where a package is not installed, without importing it, which takes seconds for torch."""
    if not is_installed(name):
        raise _needed(name, purpose)


def is_installed(name: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _needed(name: str, purpose: str) -> UsageError:
    return UsageError(f"{purpose} needs {name}: {how_to_get(name)}")
