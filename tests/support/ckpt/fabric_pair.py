"""Two processes' ends of the fabric in one: what gives, what takes, and the connection between them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from resilio_hpc.ckpt.replication.fabric import SOFTWARE, Fabric, available_providers
from resilio_hpc.ckpt.replication.fabric_lane import FabricLane
from resilio_hpc.ckpt.replication.messages import FabricPlace, Stream
from resilio_hpc.ckpt.replication.transport import MemoryPart

HOST = "127.0.0.1"
PATIENCE_S = 20.0


def software() -> list[str]:
    """Providers that need no hardware; none without libfabric."""
    try:
        return [name for name in SOFTWARE if name in available_providers()]
    except (OSError, ImportError):
        return []


def read_by() -> str:
    """What the ledger says brought a snapshot, with the first of these."""
    return f"libfabric {software()[0]}"


@dataclass
class FabricPair:
    """A giver's fabric, a taker's, and what each said."""

    giver: Fabric
    taker: Fabric
    said: list[str] = field(default_factory=list)

    @property
    def by(self) -> str:
        return f"libfabric {self.giver.provider}"

    @contextlib.contextmanager
    def lanes(
        self, patience_s: float = PATIENCE_S, place: FabricPlace | None = None
    ) -> Iterator[tuple[FabricLane, FabricLane]]:
        """The giver's lane and the taker's, of a new stream. ``place``: if it leads elsewhere."""
        one, other = socket.socketpair()
        place = place or self.giver.new_place()
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


@contextlib.contextmanager
def silent_place(pair: FabricPair) -> Iterator[FabricPlace]:
    """A place that takes connections and says nothing."""
    with socket.create_server((HOST, 0)) as listener:
        place = pair.giver.new_place()
        port = struct.pack("!H", listener.getsockname()[1])  # the address is a sockaddr_in
        yield replace(place, address=place.address[:2] + port + place.address[4:])


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
