"""The process group's rendezvous through our own pipe: its addresses travel by the check's authenticated wire.

torch's TCPStore would listen on a port that anybody can write to. This store has no socket at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist


class PipeStore(dist.Store):  # type: ignore[misc, name-defined]
    """``put`` hands a value on, ``fetch`` waits for the other half's; a store of one order."""

    def __init__(self, put: Callable[[str, bytes], None], fetch: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put = put
        self._fetch = fetch
        self._values: dict[str, bytes] = {}
        self._lock = threading.RLock()  # NCCL's own threads may ask, too

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value."""
        data = value if isinstance(value, bytes) else str(value).encode()
        with self._lock:
            self._values[key] = data
            self._put(key, data)

    def get(self, key: str) -> bytes:
        """A value, as soon as it is there: whoever waits too long is killed by the checker."""
        with self._lock:
            if key not in self._values:
                self._values[key] = self._fetch(key)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all are known here."""
        with self._lock:
            return all(key in self._values for key in keys)
