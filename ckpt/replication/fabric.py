"""Memory of other nodes, read through libfabric: InfiniBand and RoCE, EFA, Slingshot, Omni-Path, and TCP for tests.

The giver registers its memory, and the taker's adapter reads it. Nothing is copied or encrypted on the way. No provider
for RDMA could be tried without its hardware; ``tcp`` and ``sockets`` carry out the same calls over sockets.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from resilio_hpc.ckpt.replication.messages import TOKEN_BYTES, FabricPlace
from resilio_hpc.ckpt.replication.transport import MemoryPart
from resilio_hpc.core.bounded import in_time
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.snapshot_transport import SnapshotTransport

if TYPE_CHECKING:
    from resilio_hpc.native._fabric import Endpoint

HARDWARE = ("cxi", "efa", "opx", "psm2", "verbs;ofi_rxm", "psm3")
"""Providers for adapters, the best first: Slingshot, EFA, Omni-Path, InfiniBand and RoCE, Ethernet."""
SOFTWARE = ("net", "tcp", "sockets")
"""Over sockets. ``net`` is called ``tcp`` from libfabric 1.18 on.

``tcp;ofi_rxm`` of earlier ones is not used, since it crashes where an endpoint is closed with reads under way.
"""
DEVICES = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
"""One of these lists a device where there is hardware. Elsewhere libfabric need not be loaded."""
WINDOW_BYTES = 1 << 30
"""Registered at once: all of its pages are pinned meanwhile, and the other side waits."""
_CHUNK_BYTES = 2 << 20
_IN_FLIGHT = 16
_SLICE_S = 0.02
_CONNECTING_S = 0.001
_OPEN_S = 10.0
_MOST_PARTS = 50_000


_Word = Annotated[int, msgspec.Meta(ge=0)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class FabricOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be read: key and first address of each region; of the snapshot, in order: region, offset, size.

    ``error``: why there is nothing.
    """

    regions: tuple[tuple[_Word, _Word], ...] = ()
    parts: tuple[tuple[_Size, _Size, _Size], ...] = ()
    error: str = ""


def has_devices(classes: Sequence[Path] = DEVICES) -> bool:
    """Return whether the kernel has a device for RDMA."""
    return any(path.is_dir() and any(path.iterdir()) for path in classes)


def provider_for(transport: SnapshotTransport, available: Sequence[str]) -> str:
    """Return the provider to use; "": TCP without libfabric. Pure."""
    usable = {"auto": HARDWARE, "fabric": HARDWARE + SOFTWARE, "tcp": ()}[transport]
    return next((name for name in usable if name in available), "")


def available_providers() -> list[str]:
    """Return what libfabric could use here. Raises OSError, ImportError: it is not here."""
    from resilio_hpc.native import _fabric

    return sorted({provider for provider, _, _ in _fabric.providers()})


def open_fabric(transport: SnapshotTransport, host: str, say: Callable[[str], None]) -> Fabric | None:
    """Return what the choice means on this node, whose address is ``host``; None: TCP alone, and ``say`` hears why."""
    if transport == "tcp" or (transport == "auto" and not has_devices()):
        return None

    def act() -> Fabric | None:
        provider = provider_for(transport, available_providers())
        return Fabric(provider, host, say) if provider else None

    try:
        fabric = in_time(act, _OPEN_S)
    except (OSError, ImportError) as error:
        say(f"copies of snapshots go over TCP: {error}")
        return None
    if fabric is None:
        say("copies of snapshots go over TCP: libfabric has no provider that reads remote memory")
    return fabric


class Fabric:
    """This process's endpoints: one whose memory others read, and one that reads. For use from any thread."""

    def __init__(self, provider: str, host: str, say: Callable[[str], None], window_bytes: int = WINDOW_BYTES) -> None:
        """Open them, and allow as much locked memory as this user may have. Raises OSError, ImportError."""
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        self.provider = provider
        self.turn = threading.Lock()
        """Held by the one that reads."""
        self._host = host if provider in SOFTWARE else None
        self._say, self._window_bytes = say, window_bytes
        self._giver = self._open()
        self._address = self._giver.address()
        self._reader: Endpoint | None = self._open()
        self._peers: dict[bytes, int] = {}
        self._refused: set[bytes] = set()
        self._said: set[object] = set()

    def _open(self) -> Endpoint:
        from resilio_hpc.native import _fabric

        return _fabric.Endpoint(self.provider, self._host)

    def close(self) -> None:
        """Close both endpoints."""
        self._giver.close()
        self._close_reader()

    def say_once(self, subject: object, what: str) -> None:
        """Say it, unless something was said of this subject."""
        if subject not in self._said:
            self._said.add(subject)
            self._say(what)

    # -- giving ------------------------------------------------------------------------------------------------------

    def new_place(self) -> FabricPlace:
        """Return where one snapshot is given."""
        return FabricPlace(self.provider, self._address, secrets.token_bytes(TOKEN_BYTES))

    @contextlib.contextmanager
    def registered(self, parts: Sequence[MemoryPart], beat: Callable[[], None]) -> Iterator[FabricOffer]:
        """Let other nodes read these parts; ``beat`` is called between windows. Raises OSError."""
        if len(parts) > _MOST_PARTS:
            raise OSError(f"the snapshot is in {len(parts)} pieces")
        numbers: list[int] = []
        regions: list[tuple[int, int]] = []
        first: dict[int, int] = {}  # region of a memory's first window, by the memory
        offered: list[tuple[int, int, int]] = []
        try:
            for memory, offset, size in parts:
                if size and id(memory) not in first:
                    first[id(memory)] = len(regions)
                    for at in range(0, len(memory), self._window_bytes):
                        window = memory[at : at + self._window_bytes]
                        number, key, base = self._giver.register(window, True, secrets.randbits(63))
                        numbers.append(number)
                        regions.append((key, base))
                        beat()
                while size:
                    window_number, inside = divmod(offset, self._window_bytes)
                    length = min(size, self._window_bytes - inside)
                    offered.append((first[id(memory)] + window_number, inside, length))
                    offset, size = offset + length, size - length
            yield FabricOffer(tuple(regions), tuple(offered))
        finally:
            for number in numbers:
                self._giver.release(number)

    def serve(self) -> None:
        """Answer reads for a moment. Providers without an adapter need it, and all do for connections."""
        try:
            self._giver.progress(_SLICE_S)
        except OSError as error:
            self.say_once("progress", f"{self.provider}: {error}")
            time.sleep(_SLICE_S)  # the reader waits no longer than its patience

    # -- reading -----------------------------------------------------------------------------------------------------

    def leads_to(self, place: FabricPlace | None) -> bool:
        """Return whether this process may read there."""
        return place is not None and place.provider == self.provider and place.address not in self._refused

    def refuse(self, place: FabricPlace, why: str) -> None:
        """Read there no more: TCP worked where the fabric did not."""
        self._refused.add(place.address)
        self.say_once(place.address, f"copies of snapshots go over TCP, since {self.provider} failed: {why}")

    def read(
        self,
        place: FabricPlace,
        offer: FabricOffer,
        memory: memoryview,
        goes_on: Callable[[], bool],
        patience_s: float,
    ) -> bool:
        """Fill memory; return False when ``goes_on`` ended it early. The caller has ``turn``.

        Nothing writes to the memory any more when it returns or raises: OSError, TimeoutError where no read was done
        for so long, CheckpointError for an offer of another size.
        """
        if sum(size for _, _, size in offer.parts) != len(memory):
            raise CheckpointError("the other node offers another number of bytes")
        if any(region >= len(offer.regions) for region, _, _ in offer.parts):
            raise CheckpointError("the other node offers regions that it does not name")
        if self._reader is None:
            self._reader = in_time(self._open, _OPEN_S)
        reader, whole = self._reader, False
        numbers: list[int] = []
        try:
            if place.address not in self._peers:
                self._peers[place.address] = reader.peer(place.address)
            peer, in_flight, moved_at = self._peers[place.address], 0, time.monotonic()
            reads = _reads(offer, self._window_bytes)
            due = next(reads, None)
            while due is not None or in_flight:
                while due is not None and in_flight < _IN_FLIGHT:
                    at, size, address, key = due
                    window, inside = divmod(at, self._window_bytes)
                    if window == len(numbers):
                        room = memory[at - inside : at - inside + self._window_bytes]
                        numbers.append(reader.register(room, False, secrets.randbits(63))[0])
                    if not reader.read(peer, numbers[window], inside, size, address, key):
                        break
                    in_flight, due = in_flight + 1, next(reads, None)
                done = reader.progress(_SLICE_S if in_flight else _CONNECTING_S)
                in_flight -= done
                if done:
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > patience_s:
                    raise TimeoutError(f"no read was done for {patience_s:g} s")
                if not goes_on():
                    return False
            whole = True
        finally:
            if whole:
                for number in numbers:
                    reader.release(number)
            else:
                self._close_reader()  # reads under way end with it
        return True

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        self._peers.clear()
        if reader is not None:
            reader.close()


def _reads(offer: FabricOffer, window_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield where to put bytes, how many, and their address and key on the other node. None crosses a window's end."""
    at = 0
    for region, offset, size in offer.parts:
        key, base = offer.regions[region]
        while size:
            length = min(size, _CHUNK_BYTES, window_bytes - at % window_bytes)
            yield at, length, base + offset, key
            at, offset, size = at + length, offset + length, size - length
