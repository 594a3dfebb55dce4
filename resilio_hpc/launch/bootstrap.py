"""How a new interpreter finds this package, wherever it is installed, without leaving marks on a rank's paths."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import resilio_hpc

PACKAGE_PARENT = str(Path(resilio_hpc.__file__).parent.parent)


def source(module: str) -> str:
    """Source for ``python -c`` that runs ``main`` of a module of this folder, wherever we are installed."""
    return (
        "import sys; sys.flags.safe_path or sys.path.remove(''); import importlib.util; "  # '' may hang
        # an installed package is found without its place being on the path
        f"importlib.util.find_spec('resilio_hpc') or sys.path.append({PACKAGE_PARENT!r}); "
        f"from resilio_hpc.launch.{module} import main; main()"
    )


def command(module: str) -> tuple[str, ...]:
    """``python -m`` for a module of this package, which does not search the working directory: that may hang.

    It does search it where we were found nowhere else (a checkout that is not installed)."""
    apart = sys.path if sys.flags.safe_path else sys.path[1:]
    installed = PACKAGE_PARENT in apart or any(importlib.metadata.distributions(name="resilio_hpc", path=list(apart)))
    return (sys.executable, *(("-P",) if installed else ()), "-m", f"resilio_hpc.{module}")
