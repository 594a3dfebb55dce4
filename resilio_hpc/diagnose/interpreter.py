"""How a new interpreter runs a module of this folder, wherever the package is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import resilio_hpc

_PARENT = str(Path(resilio_hpc.__file__).parent.parent)


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Run ``main`` of the module. The working directory is not searched: it may be on a file system that hangs."""
    source = (
        "import sys; '' in sys.path and sys.path.remove(''); import importlib.util; "
        f"importlib.util.find_spec('resilio_hpc') or sys.path.append({_PARENT!r}); "
        f"from resilio_hpc.diagnose.{module} import main; main()"
    )
    return (sys.executable, "-c", source, *arguments)
