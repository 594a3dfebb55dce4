"""CUDA's devices (AMD's count as such): copies into page-locked memory, on streams of their own.

A copy follows all work that the device's current stream had before, and later changes of the tensor wait for it on the
device. So the host waits for nothing here, unless it asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resilio_hpc.ckpt.devices.interface import Mark
from resilio_hpc.core.errors import LayoutMismatch

_LOOK_S = 0.002
_AFTER_ERRORS = ("CUDA error", "HIP error", "device-side assert")


class Cuda:
    """``Device`` by torch, imported only by a process that has torch's tensors."""

    kind = "cuda"
    classes: tuple[type, ...] = ()
    rebuilds = False

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

    def copy_in(self, target: Any, source: Any) -> None:
        """See Device."""
        target.copy_(source)

    def synchronize(self, where: Any, timeout_s: float) -> bool:
        """See Device. Work of all streams counts as far as the current one waits for it."""
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(where))
        until = time.monotonic() + timeout_s
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return True

    def free_bytes(self, where: Any) -> int | None:
        """See Device. What torch's allocator keeps unused counts as free."""
        import torch

        kept = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return int(torch.cuda.mem_get_info(where)[0]) + kept

    def rng_state(self) -> Any:
        """See Device."""
        torch = sys.modules.get("torch")
        if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return None
        return [value.numpy().tobytes() for value in torch.cuda.get_rng_state_all()]

    def set_rng_state(self, state: Any) -> None:
        """See Device."""
        import torch

        if len(state) > torch.cuda.device_count():
            raise LayoutMismatch(
                f"generators of {len(state)} CUDA devices were saved, here are {torch.cuda.device_count()}"
            )
        for device, value in enumerate(state):
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(value), dtype=torch.uint8), device)

    def is_rebuilt(self, value: Any) -> bool:
        """See Device."""
        return False

    def loses_state(self, error: BaseException) -> bool:
        """See Device. After such an error every call of the process fails."""
        text = str(error)
        return any(part in text for part in _AFTER_ERRORS)

    def rebuild(self) -> None:
        """See Device."""


class _Recorded:
    """A ``Mark``: a CUDA event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()
