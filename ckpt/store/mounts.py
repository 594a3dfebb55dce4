"""The store of a path: an object store for s3://…, one mounted at it or above it, else the file system.

A run's directory of checkpoints may be a link to ``s3://bucket/prefix``: its steps are there then.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from resilio_hpc.ckpt.store.backend import Store
from resilio_hpc.ckpt.store.posix import PosixStore
from resilio_hpc.ckpt.store.urls import S3, store_url

if TYPE_CHECKING:
    from resilio_hpc.ckpt.store.s3_store import S3Store

_POSIX = PosixStore()
_mounted: dict[Path, Store] = {}
_urls: dict[Path, str] = {}  # of links that were looked at: later looks must not wait for a file system that hangs
RUN_CHECKPOINTS = "checkpoints"
"""The one name, in a run's directory, that may be a link to an object store."""


def store_of(path: Path) -> Store:
    """Return the store of a path. Raises UsageError where the package for an object store is missing."""
    for prefix, store in _mounted.items():
        if path.is_relative_to(prefix):
            return store
    parts = path.parts
    if S3 in parts:
        at = parts.index(S3)
        return _object_store(Path(*parts[: at + 1]), "/".join(parts[at + 1 :][:1]))
    for at, part in enumerate(parts):
        if part == RUN_CHECKPOINTS:
            link = Path(*parts[: at + 1])
            if url := _urls[link] if link in _urls else linked_url(link):
                return _object_store(link, *url.removeprefix("s3://").split("/", 1))
    return _POSIX


def linked_url(link: Path) -> str:
    """Look at a link. Return the URL of the object store that it names; "" where it is no such link."""
    try:
        _urls[link] = store_url(str(link.readlink()))
    except OSError as error:
        if error.errno != errno.EINVAL:  # not a directory: nothing is there yet, or the file system does not answer
            return ""
        _urls[link] = ""
    return _urls[link]


@cache
def _object_store(prefix: Path, bucket: str, key: str = "") -> S3Store:
    from resilio_hpc.ckpt.store.s3_bucket import S3Bucket
    from resilio_hpc.ckpt.store.s3_store import S3Store

    return S3Store(S3Bucket(bucket), prefix if key or prefix.name != S3 else prefix / bucket, key)


@contextmanager
def mount(prefix: Path, store: Store) -> Iterator[None]:
    """Mount a store at ``prefix``, for this process."""
    _mounted[prefix] = store
    try:
        yield
    finally:
        del _mounted[prefix]
