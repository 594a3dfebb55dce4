"""A stand-in for CUDA where there is no GPU: streams whose copies run as late as they may.

Tensors of the CPU count as the device's when they were given to ``put``. What a test does to them is what the current
stream does, at once; a copy runs only when somebody waits for it, or when the current stream is held. So a copy for
which nobody waits in time sees what came later, and the snapshot is wrong. Whatever it does not know is an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from resilio_hpc.ckpt.devices.interface import Mark


class FakeMark:
    def __init__(self, device: FakeDevice, after: int) -> None:
        self._device, self.after = device, after

    def wait(self) -> None:
        self._device.run_until(self.after)


class FakeDevice:
    """``Device``. ``largest_strided``: bytes of the largest part that was not contiguous; ``fails_at``: which copy."""

    def __init__(self, locks: bool = True) -> None:
        self.refusal = ""
        self._locks = locks
        self._tensors: list[torch.Tensor] = []
        self._queue: list[Callable[[], None] | None] = []
        self._begun = 0
        self._followed = False
        self.is_stuck = False
        """The current stream waits for a collective that never ends."""
        self._is_beside = False
        self._lock = threading.Lock()
        self.locked: list[tuple[int, int]] = []
        self.largest_strided = 0
        self.fails_at = -1

    def put(self, *tensors: torch.Tensor) -> None:
        self._tensors += tensors

    def place(self, value: Any) -> Any:
        storages = [tensor.untyped_storage().data_ptr() for tensor in self._tensors]
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storages:
            return "fake:0"
        return None

    def follow(self, where: Any) -> None:
        assert where == "fake:0"
        assert self._is_beside or not self.is_stuck, "it would wait for ever"
        self._followed = True

    def copy(self, part: Any, target: memoryview) -> None:
        assert self._followed, "a copy may begin before what it copies is there"
        assert part.nbytes == len(target)
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        assert not self._locks or any(at <= address < at + size for at, size in self.locked), (
            "this memory is not locked"
        )
        if len(self._queue) == self.fails_at:
            raise RuntimeError("CUDA error: out of memory")
        if not part.is_contiguous():
            self.largest_strided = max(self.largest_strided, part.nbytes)
        size = part.nbytes

        def run() -> None:
            data = part.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
            ctypes.memmove(address, data.ctypes.data, size)

        self._queue.append(run)

    def mark(self, where: Any) -> Mark:
        assert where == "fake:0"
        return FakeMark(self, len(self._queue))

    def hold(self, where: Any, mark: Mark) -> None:
        assert where == "fake:0" and isinstance(mark, FakeMark)
        self.run_until(mark.after)

    def boundary(self, where: Any) -> Any:
        assert where == "fake:0" and not self.is_stuck
        return self

    @contextlib.contextmanager
    def beside(self, boundaries: Mapping[Any, Any]) -> Iterator[None]:
        assert boundaries == {"fake:0": self}
        self._is_beside = True
        yield
        self._is_beside = False

    def free_bytes(self, where: Any) -> int | None:
        assert where == "fake:0"
        return None

    def run_until(self, number: int) -> None:
        with self._lock:
            for at in range(self._begun, number):
                run, self._queue[at] = self._queue[at], None
                assert run is not None
                run()
            self._begun = max(self._begun, number)

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        if not self._locks:
            self.refusal = "no pages are locked here"
            return None
        place = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))
        assert place not in self.locked
        self.locked.append(place)
        return lambda: self.locked.remove(place)
