"""Copies from CUDA devices (AMD's count as such) into page-locked memory, on streams of their own.

A copy follows all work that the device's current stream had before, and later changes of the tensor wait for it on the
device. So the host waits for nothing here, unless it asks. ``Device`` is the interface of a device; ``Cuda`` implements
it with torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from resilio_hpc.ckpt.format.manifest import blocks
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import crc32c

_SHARE_BYTES = 32 << 20
_PART_BYTES = 16 << 20  # the device needs as much memory again for a tensor that is not contiguous
"""Checksums of so much are computed in one go, while more is arriving."""


class ChecksumSlot(NamedTuple):
    """Where the checksum of one block goes."""

    checksums: list[int]
    number: int


Begun = tuple[list[ChecksumSlot], Future[list[int]]]
"""Copies under way: where the checksums of their blocks go, and, once they are complete, these."""


class Mark(Protocol):
    """A point in a device's stream of copies."""

    def wait(self) -> None:
        """Return when all copies before it are complete."""
        ...


class Device(Protocol):
    """The interface of a kind of devices; ``where`` is a result of ``place``.

    Only ``Mark.wait`` waits for the device.
    """

    refusal: str
    """Why memory cannot be page-locked; "": it can, as far as is known."""

    def place(self, value: Any) -> Any:
        """Return on which device this tensor is; None: on none of this kind."""
        ...

    def follow(self, where: Any) -> None:
        """Let later copies see the results of the current stream's work so far."""
        ...

    def copy(self, part: Any, target: memoryview) -> None:
        """Begin to copy one of ``parts``, in row-major order."""
        ...

    def mark(self, where: Any) -> Mark:
        """Return a mark after all copies so far."""
        ...

    def hold(self, where: Any, mark: Mark) -> None:
        """Let later work of the current stream wait for ``mark``."""
        ...

    def boundary(self, where: Any) -> Any:
        """Return the end of the current stream's work so far, for ``beside``."""
        ...

    def beside(self, boundaries: Mapping[Any, Any]) -> contextlib.AbstractContextManager[None]:
        """Let this thread's copies follow what came before these ``boundary``, by device, and nothing that came later.

        A collective that waits for a lost rank never ends.
        """
        ...

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        """Lock the pages, so that the device writes straight into them.

        Return what unlocks them, before they are unmapped.

        None: there is no device in use, or it refuses: then copies take longer, and the host waits for them.
        """
        ...


class Cuda:
    """``Device`` by torch, imported only by a process that has torch's tensors."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}
        self.refusal = ""

    def place(self, value: Any) -> Any:
        """See Device."""
        device = getattr(value, "device", None)
        return device if getattr(device, "type", "") == "cuda" else None

    def follow(self, where: Any) -> None:
        """See Device."""
        import torch

        if where not in self._streams:
            self._streams[where] = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        self._streams[where].wait_stream(torch.cuda.current_stream(where))

    def copy(self, part: Any, target: memoryview) -> None:
        """See Device."""
        import torch

        with torch.cuda.stream(self._streams[part.device]):
            room = torch.frombuffer(target, dtype=torch.uint8)
            room.view(part.dtype).view(part.shape).copy_(part, non_blocking=True)

    def mark(self, where: Any) -> Mark:
        """See Device."""
        import torch

        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[where])
        return _Recorded(event)

    def hold(self, where: Any, mark: Mark) -> None:
        """See Device."""
        import torch

        assert isinstance(mark, _Recorded)
        torch.cuda.current_stream(where).wait_event(mark.event)

    def boundary(self, where: Any) -> Any:
        """See Device."""
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(where))
        return event

    @contextlib.contextmanager
    def beside(self, boundaries: Mapping[Any, Any]) -> Iterator[None]:
        """See Device."""
        import torch

        with contextlib.ExitStack() as streams:
            for where, event in boundaries.items():
                stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                streams.enter_context(torch.cuda.stream(stream))
            yield

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        """See Device."""
        torch = sys.modules.get("torch")
        if torch is None or self.refusal or not torch.cuda.is_initialized():
            return None
        runtime = torch.cuda.cudart()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = int(runtime.cudaHostRegister(address, len(memory), 0))
        if code == 0:
            return lambda: runtime.cudaHostUnregister(address)
        self.refusal = f"CUDA does not page-lock the memory of snapshots (cudaHostRegister: error {code})"
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error until a call returns it
            torch.zeros(1, device="cuda")
        return None


class _Recorded:
    """A ``Mark``: a CUDA event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()


CUDA = Cuda()
"""One for a process: it keeps a stream for each device."""


class Transfer(NamedTuple):
    """A tensor of a device, the byte ``at`` of the arena where it goes, and the slots of its blocks' checksums."""

    value: Any
    at: int
    checksums: list[int]


class DeviceCopies:
    """The copies of one snapshot from devices into its arena, ``room``."""

    def __init__(self, device: Device, room: memoryview, pool: ThreadPoolExecutor) -> None:
        self._device, self._room, self._pool = device, room, pool
        self._marks: dict[Any, Mark] = {}

    def follow(self, where: Any) -> None:
        """Let copies see the results of this device's current stream so far. Raises CheckpointError."""
        with _failures():
            self._device.follow(where)
            self._marks[where] = self._device.mark(where)

    def begin(self, where: Any, transfers: Iterable[Transfer]) -> list[Begun]:
        """Begin to copy tensors of one device, after ``follow``. Raises CheckpointError, and so do the results."""
        begun: list[Begun] = []
        slots: list[ChecksumSlot] = []
        extents: list[tuple[int, int]] = []
        waiting_bytes = 0

        def submit() -> None:
            nonlocal slots, extents, waiting_bytes
            with _failures():
                self._marks[where] = mark = self._device.mark(where)
            begun.append((slots, self._pool.submit(self._checksums, mark, extents)))
            slots, extents, waiting_bytes = [], [], 0

        for value, at, checksums in transfers:
            done, number, ends = 0, 0, blocks(value.nbytes)
            for part in parts(value, _PART_BYTES):
                with _failures():
                    self._device.copy(part, self._room[at + done : at + done + part.nbytes])
                done += part.nbytes
                while number < len(ends) and sum(ends[number]) <= done:
                    start, size = ends[number]
                    slots.append(ChecksumSlot(checksums, number))
                    extents.append((at + start, size))
                    waiting_bytes += size
                    number += 1
                if waiting_bytes >= _SHARE_BYTES:
                    submit()
        if slots:
            submit()
        return begun

    def hold(self) -> None:
        """Hold the devices: they change nothing until they have copied what was begun."""
        for where, mark in self._marks.items():
            self._device.hold(where, mark)

    def settle(self) -> None:
        """Wait for the devices, so that nothing is written to the arena any more, whatever went wrong."""
        for where in self._marks:
            with contextlib.suppress(RuntimeError):  # a device that failed writes nothing either
                self._device.mark(where).wait()

    def _checksums(self, mark: Mark, extents: list[tuple[int, int]]) -> list[int]:
        with _failures():
            mark.wait()
        return [crc32c(self._room[at : at + size]) for at, size in extents]


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn torch's errors into CheckpointError: of a device that fails, or that has no memory for a part."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(f"a tensor cannot be copied from its device: {error}") from error


def parts(value: Any, size_bytes: int) -> Iterator[Any]:
    """Yield the tensor in parts, in row-major order, of at most that size (or an element); none of an empty one.

    The copy of a part that is not contiguous takes as much memory of the device.
    """
    if not value.nbytes:
        return
    if value.nbytes <= size_bytes:
        yield value
    elif value.is_contiguous():
        yield from value.reshape(-1).split(max(1, size_bytes // value.itemsize))
    elif rows := size_bytes * len(value) // value.nbytes:
        yield from value.split(rows)
    else:
        for row in value:
            yield from parts(row, size_bytes)
