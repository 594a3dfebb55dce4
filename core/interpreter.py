"""How a new interpreter runs a module of this package, wherever it is installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE_PARENT = str(Path(__file__).parents[2])


def source(module: str) -> str:
    """Return source for ``python -c`` that runs ``main`` of a module of this package.

    The working directory is not searched: it may be on a file system that hangs. An installed package is found although
    its directory is not on the path.
    """
    return (
        "import sys; '' in sys.path and sys.path.remove(''); import importlib.util; "
        f"importlib.util.find_spec('resilio_hpc') or sys.path.append({PACKAGE_PARENT!r}); "
        f"from resilio_hpc.{module} import main; main()"
    )
