"""Parallel layouts: how one training iteration is spread over GPUs; many of them as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.float64]
"""One value per row (n,), or one for all rows (1,)."""


class Recompute(IntEnum):
    """What is computed again in the backward pass instead of being kept."""

    NONE = 0
    SELECTIVE = 1  # the attention core only (arXiv:2205.05198)
    FULL = 2  # every layer from its input
    ALTERNATE = 3  # every second layer, or as much of every layer (torchtitan "selective")


@dataclass(frozen=True)
class Layout:
    """One layout. GPUs: tp · pp · dp · cp; expert parallelism (ep) lies inside dp · cp · tp.

    ``zero``: what is sharded over dp: 1 optimizer, 2 and gradients, 3 and parameters (FSDP).
    Group order from the inside of a node outwards: tp, cp, dp, pp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    zero_bubble: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches per iteration and data-parallel replica."""
        return -(-self.global_batch // (self.micro_batch * self.dp))

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"mb{self.micro_batch}"]
        parts += [
            f"{name}{value}" for name, value in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp)) if value > 1
        ]
        parts += ["sp"] * self.sequence_parallel + [f"zero{self.zero}"] * (self.zero > 0) + ["zb"] * self.zero_bubble
        return "-".join([*parts, f"recompute-{self.recompute.name.lower()}"])


@dataclass(frozen=True)
class Layouts:
    """Layouts as columns."""

    tp: Column
    pp: Column
    dp: Column
    micro_batch: Column
    global_batch: Column
    vpp: Column
    cp: Column
    ep: Column
    sequence_parallel: Column
    recompute: Column
    zero: Column
    zero_bubble: Column

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Layouts:
        return cls(**{f.name: np.array([getattr(x, f.name) for x in layouts], dtype=float) for f in fields(cls)})

    def __len__(self) -> int:
        return max(int(getattr(self, field.name).size) for field in fields(self))

    def row(self, index: int) -> Layout:
        values = {f.name: int(np.broadcast_to(getattr(self, f.name), (len(self),))[index]) for f in fields(self)}
        flags = {name: bool(values.pop(name)) for name in ("sequence_parallel", "zero_bubble")}
        return Layout(**{**values, "recompute": Recompute(values["recompute"])}, **flags)  # type: ignore[arg-type]

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Layouts:
        """The rows of these indices or of this mask."""
        size = len(self)
        return Layouts(**{f.name: np.broadcast_to(getattr(self, f.name), (size,))[index] for f in fields(self)})

    @property
    def num_gpus(self) -> Column:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> Column:
        return np.ceil(self.global_batch / (self.micro_batch * self.dp))
