"""The part of a state that is a rank's own where ranks hold the same tensors, as bytes.

It has the tree, in which tensors and torch's objects are left out, and small tensors on the CPU. Models, optimizers,
schedules of learning rates and scalers of gradients are the same on all ranks. With another rank's saved state it gives
this rank's (``format.own_parts``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.ckpt.state import overlap, tensors, tree
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.parts_held import WHOLE, PartsHeld
from resilio_hpc.ckpt.state.paths import LEFT_OUT, joined
from resilio_hpc.ckpt.state.slab import Slab, is_dtensor
from resilio_hpc.ckpt.state.watched import is_module, is_scaler, is_schedule

MOST_BYTES = 256 << 10
"""Of tensors, such as the state of a generator; larger ones are another rank's, too."""
MOST_OF_ONE = 64 << 10


def own_part(state: Any, held: PartsHeld = WHOLE) -> bytes:
    """Return a rank's own part of ``state``; ``held``: which parts of tensors it has. Raises UsageError."""
    encoder = _Outliner()
    node = encoder.encode(state, ())
    return msgspec.msgpack.encode([msgspec.json.encode(node), encoder.own, *held])


def own_paths(state: Any) -> set[str]:
    """Return the paths of the tensors that are in a rank's own part. Raises UsageError."""
    encoder = _Outliner()
    encoder.encode(state, ())
    return {path for path, *_ in encoder.own}


class _Outliner(tree.Encoder):
    """Encodes all but tensors and torch's objects; ``own``: small tensors, each with its description and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[tuple[str, str, str, tuple[int, ...], bytes]] = []
        self._room = MOST_BYTES

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if is_module(value) or overlap.is_optimizer(value) or is_schedule(value) or is_scaler(value):
            return LEFT_OUT
        if tensors.is_tensor(value):
            self._take(value, path)
            return LEFT_OUT
        return LEFT_OUT if type(value) in (Slab, FlatSlab) else super().encode(value, path)

    def _take(self, value: Any, path: tuple[Any, ...]) -> None:
        """Take a small tensor; one on a device would have to be waited for. One that is rebuilt needs no content."""
        device = DEVICES.of(value)
        if device is not None and device.is_rebuilt(value):
            leaf = tensors.describe(value, joined(path))
            self.own.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, b""))
            return
        if is_dtensor(value) or not 0 < value.nbytes <= min(self._room, MOST_OF_ONE):
            return
        if hasattr(value, "device") and getattr(value.device, "type", "cpu") != "cpu":
            return
        leaf = tensors.describe(value, joined(path))
        data = bytearray(leaf.size_bytes)
        tensors.copy_out(leaf.value, memoryview(data))
        self._room -= leaf.size_bytes
        self.own.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, bytes(data)))
