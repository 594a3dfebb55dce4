"""The result of the readers of other programs' formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resilio_hpc.ckpt.state.tensors import Leaf


@dataclass(frozen=True)
class Imported:
    """A nested state. Its tensors are mapped from the file, or are placeholders for those that ``fetch`` reads."""

    state: Any
    fetch: Callable[[Leaf], Any] | None = None
