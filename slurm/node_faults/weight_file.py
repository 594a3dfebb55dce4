"""The file that keeps the known weights of nodes from one ``resilio nodes apply`` to the next, beside the ledger."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import HealthError
from resilio_hpc.slurm.node_faults.node_weights import KnownWeight

_MOST_BYTES = 64 << 20


class _Content(msgspec.Struct, frozen=True):
    nodes: dict[str, KnownWeight]
    v: int = 1


class WeightFile:
    """``weights.json`` in the ledger's directory. Use it ``locked``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "weights.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the file. Raises HealthError where another call holds it, or nothing can be written."""
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(
                self._directory / "weights.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise HealthError(f"weights cannot be kept in {self._directory}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise HealthError(f"another resilio nodes apply is at work with {self._directory}") from None
        finally:
            os.close(lock)

    def read(self) -> dict[str, KnownWeight]:
        """Return node → what is known; empty without a file.

        Raises HealthError where it is damaged: only this file tells which weights are this package's. Raises Untrusted.
        """
        if not self._path.exists():
            return {}
        try:
            content = trusted_files.read(self._path, _MOST_BYTES)
        except OSError:
            content = b""
        try:
            return msgspec.json.decode(content, type=_Content).nodes
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HealthError(
                f"{self._path} is damaged, so it is unknown which weights are ours: remove it, and the weights that "
                "nodes have then are taken for the site's"
            ) from error

    def write(self, known: Mapping[str, KnownWeight]) -> None:
        """Replace it. Raises HealthError, and then the old one stays."""
        try:
            write_atomic(self._path, msgspec.json.encode(_Content(dict(known))))
        except OSError as error:
            raise HealthError(f"weights cannot be kept in {self._directory}: {error.strerror}") from error
