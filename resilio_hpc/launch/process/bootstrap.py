"""How a new interpreter finds this package, wherever it is installed, without a change of a rank's paths."""

from __future__ import annotations

import functools
import importlib.machinery
import sys

import resilio_hpc
from resilio_hpc.core.compat import NO_DIRECTORY, SAFE_PATH


def command(module: str) -> tuple[str, ...]:
    """Return ``python -m`` for a module of this package, without a search of the working directory, which may hang.

    The directory is searched where the package was found nowhere else (a checkout that is not installed).
    """
    if not _found_elsewhere():
        return (sys.executable, "-m", f"resilio_hpc.{module}")
    if not NO_DIRECTORY:
        run = f"import sys; sys.path.remove(''); import runpy; runpy._run_module_as_main('resilio_hpc.{module}')"
        return (sys.executable, "-c", run)  # Python 3.10; it is what -m itself calls
    return (sys.executable, *NO_DIRECTORY, "-m", f"resilio_hpc.{module}")


@functools.cache
def _found_elsewhere() -> bool:
    path = sys.path if SAFE_PATH else sys.path[1:]  # the first entry is the script's or the working directory
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]  # editable installs
    spec = importlib.machinery.PathFinder.find_spec("resilio_hpc", list(path))
    found = [spec, *(finder.find_spec("resilio_hpc", None) for finder in finders)]
    first = next((spec for spec in found if spec is not None), None)
    return first is not None and first.origin == resilio_hpc.__file__
