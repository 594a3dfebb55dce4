"""What of a live state a restore must not drop: tensors, objects, and what is no state at all."""

from __future__ import annotations

from collections import deque
from typing import Any

from resilio_hpc.ckpt.state import containers, plain_values, tensors
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.containers import NOTHING, SEQUENCES
from resilio_hpc.ckpt.state.decoded_tree import TensorRef
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.plain_values import SCALARS
from resilio_hpc.ckpt.state.slab import Slab, slab_of
from resilio_hpc.ckpt.state.tree import has_state
from resilio_hpc.core.errors import LayoutMismatch, UsageError


def refuse_to_lose(live: Any, saved: Any, path: tuple[Any, ...]) -> None:
    """Refuse to drop live tensors and objects silently; a plain value may replace any plain value.

    Raises LayoutMismatch; UsageError for what no state can hold, such as the function that makes one.
    """
    if live is NOTHING or type(live) in SCALARS:
        return
    if _holds_live_parts(live):
        what = "a tensor" if isinstance(saved, TensorRef) else f"a {type(saved).__name__}"
        size = f" of {len(saved)}" if type(saved) in SEQUENCES else ""
        raise LayoutMismatch(f"{place(path)}: the checkpoint holds {what}{size}, the state a {type(live).__name__}")
    if not isinstance(live, dict | list | tuple | deque):
        try:
            plain_values.encode(live)
        except UsageError as error:
            raise UsageError(f"{place(path)}: nothing can be restored into it: {error}") from error


def _holds_live_parts(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | deque):
        return not containers.holds_scalars_only(value) and any(
            map(_holds_live_parts, value.values() if isinstance(value, dict) else value)
        )
    return is_tensor(value) or type(value) is AnyLayout or has_state(value)


def is_slab(value: Any) -> bool:
    """Return whether a live value is a part of a tensor."""
    return type(value) is FlatSlab or slab_of(value) is not None


def is_tensor(value: Any) -> bool:
    """Return whether a live value is a tensor, or a part of one."""
    return type(value) in (Slab, FlatSlab) or tensors.is_tensor(value)
