"""How a new interpreter runs a module of this folder."""

from __future__ import annotations

import sys

from resilio_hpc.core import interpreter


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs ``main`` of the module."""
    return (sys.executable, "-c", interpreter.source(f"diagnose.{module}"), *arguments)
