"""The CPU as a device. Snapshots copy its tensors by ways of their own, without this one's copies."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any

from resilio_hpc.ckpt.devices.interface import Mark
from resilio_hpc.core.memory_left import memory_left


class Cpu:
    """``Device`` for torch's tensors on the CPU: everything is complete on return."""

    kind = "cpu"
    classes: tuple[type, ...] = ()
    rebuilds = False
    refusal = ""

    def place(self, value: Any) -> Any:
        """See Device."""
        device = getattr(value, "device", None)
        return device if getattr(device, "type", "") == "cpu" else None

    def follow(self, where: Any) -> None:
        """See Device."""

    def copy(self, part: Any, target: memoryview) -> None:
        """See Device."""
        data = part.detach().resolve_conj().resolve_neg().contiguous()
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), data.data_ptr(), data.nbytes)

    def mark(self, where: Any) -> Mark:
        """See Device."""
        return _Complete()

    def hold(self, where: Any, mark: Mark) -> None:
        """See Device."""

    def boundary(self, where: Any) -> Any:
        """See Device."""
        return None

    def beside(self, boundaries: Mapping[Any, Any]) -> contextlib.AbstractContextManager[None]:
        """See Device."""
        return contextlib.nullcontext()

    def lock_pages(self, memory: memoryview) -> Callable[[], None] | None:
        """See Device."""
        return None

    def copy_in(self, target: Any, source: Any) -> None:
        """See Device."""
        target.copy_(source)

    def synchronize(self, where: Any, timeout_s: float) -> bool:
        """See Device."""
        return True

    def free_bytes(self, where: Any) -> int | None:
        """See Device."""
        found = memory_left()
        return None if found is None else found.left_bytes

    def rng_state(self) -> Any:
        """See Device."""
        torch = sys.modules.get("torch")
        return None if torch is None else torch.get_rng_state().numpy().tobytes()

    def set_rng_state(self, state: Any) -> None:
        """See Device."""
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def is_rebuilt(self, value: Any) -> bool:
        """See Device."""
        return False

    def loses_state(self, error: BaseException) -> bool:
        """See Device. Memory of the host is there for as long as the process."""
        return False

    def rebuild(self) -> None:
        """See Device."""


class _Complete:
    """A ``Mark``."""

    def wait(self) -> None:
        """See Mark."""
