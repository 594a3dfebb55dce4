"""Two processes' ends of the fabric in one: what gives, what takes, and the connection between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from resilio_hpc.ckpt.replication.fabric import Fabric, available_providers
from resilio_hpc.ckpt.replication.fabric_lane import FabricLane
from resilio_hpc.ckpt.replication.messages import Stream
from resilio_hpc.ckpt.replication.transport import MemoryPart

HOST = "127.0.0.1"
PATIENCE_S = 20.0


def software() -> list[str]:
    """Providers that need no hardware; none without libfabric."""
    try:
        return [name for name in ("tcp;ofi_rxm", "tcp", "sockets") if name in available_providers()]
    except (OSError, ImportError):
        return []


@dataclass
class FabricPair:
    """A giver's fabric, a taker's, and what each said."""

    giver: Fabric
    taker: Fabric
    said: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def lanes(self, patience_s: float = PATIENCE_S) -> Iterator[tuple[FabricLane, FabricLane]]:
        """The giver's lane and the taker's, of a new stream."""
        one, other = socket.socketpair()
        place = self.giver.new_place()
        stream = Stream.new(0, place)
        with one, other:
            yield (
                FabricLane(one, stream, place, self.giver, patience_s),
                FabricLane(other, stream, place, self.taker, patience_s),
            )

    def transfer(
        self,
        parts: Sequence[MemoryPart],
        into: memoryview,
        goes_on: Callable[[], bool] = lambda: True,
        patience_s: float = PATIENCE_S,
    ) -> tuple[bool, str]:
        """Give in a thread and take here. Whether it came whole, and by what."""
        with self.lanes(patience_s) as (gives, takes):
            thread = threading.Thread(target=quietly, args=(lambda: gives.give(parts),))
            thread.start()
            try:
                return takes.take(into, goes_on), takes.by
            finally:
                takes.end()
                thread.join()


def quietly(act: Callable[[], object]) -> None:
    """What a giver does when its reader is gone."""
    with contextlib.suppress(OSError):
        act()


@contextlib.contextmanager
def fabric_pair(provider: str, window_bytes: int = 1 << 20) -> Iterator[FabricPair]:
    said: list[str] = []
    giver, taker = (Fabric(provider, HOST, said.append, window_bytes) for _ in range(2))
    yield FabricPair(giver, taker, said)
    giver.close()
    taker.close()
