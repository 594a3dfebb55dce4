"""The store of a path: the one mounted at it or above it, else the file system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.ckpt.store.backend import Store
from resilio_hpc.ckpt.store.posix import PosixStore

_POSIX = PosixStore()
_mounted: dict[Path, Store] = {}


def store_of(path: Path) -> Store:
    """Return the store of a path."""
    for prefix, store in _mounted.items():
        if path.is_relative_to(prefix):
            return store
    return _POSIX


@contextmanager
def mount(prefix: Path, store: Store) -> Iterator[None]:
    """Mount a store at ``prefix``, for this process."""
    _mounted[prefix] = store
    try:
        yield
    finally:
        del _mounted[prefix]
