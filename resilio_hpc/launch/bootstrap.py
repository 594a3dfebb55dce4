"""How a new interpreter finds this package, wherever it is installed, without leaving marks on a rank's paths."""

from __future__ import annotations

from pathlib import Path

import resilio_hpc

PACKAGE_PARENT = str(Path(resilio_hpc.__file__).parent.parent)


def source(module: str) -> str:
    """Source for ``python -c`` that runs ``main`` of a module of this folder, wherever we are installed."""
    return (
        "import importlib.util, sys; "  # an installed package is found without its place being on the path
        f"importlib.util.find_spec('resilio_hpc') or sys.path.append({PACKAGE_PARENT!r}); "
        f"sys.flags.safe_path or sys.path.remove(''); from resilio_hpc.launch.{module} import main; main()"
    )
