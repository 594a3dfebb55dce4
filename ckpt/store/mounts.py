"""Which store a path belongs to: what ``mount`` named for it or for a path above it, else the file system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.ckpt.store.backend import Store
from resilio_hpc.ckpt.store.posix import PosixStore

_POSIX = PosixStore()
_mounted: dict[Path, Store] = {}


def store_of(path: Path) -> Store:
    """Return the store that has a path."""
    for prefix, store in _mounted.items():
        if path.is_relative_to(prefix):
            return store
    return _POSIX


@contextmanager
def mount(prefix: Path, store: Store) -> Iterator[None]:
    """Let a store have all paths from ``prefix`` on, in this process."""
    _mounted[prefix] = store
    try:
        yield
    finally:
        del _mounted[prefix]
