"""A module file in Tcl, which Environment Modules and Lmod both read. Pure."""

from __future__ import annotations

from pathlib import Path

import resilio_hpc
from resilio_hpc.core.errors import UsageError

PLACE = f"modulefiles/resilio/{resilio_hpc.__version__}"
_SUMMARY = "keeps training and MPI jobs making progress on Slurm, whatever breaks"


def text(prefix: Path) -> str:
    """Return the file for commands in ``prefix``/bin, beside which man finds their pages. Raises UsageError."""
    if any(one in "{}\\:" or one.isspace() for one in str(prefix)):
        raise UsageError(f"{str(prefix)!r} cannot be in a module file: choose a path without spaces, braces and colons")
    version = resilio_hpc.__version__
    lines = [
        "#%Module1.0",
        f"proc ModulesHelp {{ }} {{ puts stderr {{resilio {version}: {_SUMMARY}. See: man resilio}} }}",
        f"module-whatis {{resilio {version}: {_SUMMARY}}}",
        "conflict resilio",
        f"prepend-path PATH {{{prefix}/bin}}",
    ]
    return "\n".join(lines) + "\n"
