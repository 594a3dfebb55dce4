"""Parallel layouts: how one training iteration is spread over GPUs; many layouts as columns."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Generic, TypeVar

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column, Columns, default
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

Number = TypeVar("Number")
Flag = TypeVar("Flag")
Kind = TypeVar("Kind")


class Recompute(IntEnum):
    """Which activations are computed again in the backward pass instead of being kept."""

    NONE = 0
    SELECTIVE = 1  # the attention core only (arXiv:2205.05198)
    FULL = 2  # every layer from its input
    ALTERNATE = 3  # every second layer, or as much of every layer (torchtitan "selective")


@dataclass(frozen=True)
class Dimensions(Generic[Number, Flag, Kind]):
    """The one list of what makes a layout. GPUs: tp · pp · dp · cp; expert parallelism (ep) lies inside dp · cp · tp.

    ``zero``: what is sharded over dp: 1 optimizer, 2 and gradients, 3 and parameters (FSDP).
    Group order from the inside of a node outwards: tp, cp, dp, pp. ``title``: what a person calls a dimension in which
    two layouts for the same GPUs differ.
    """

    tp: Number = default(1, title="tensor parallel degree")
    pp: Number = default(1, title="pipeline depth")
    dp: Number = default(1)
    micro_batch: Number = default(1, title="micro-batch")
    global_batch: Number = default(1)
    vpp: Number = default(1, title="interleaving")
    cp: Number = default(1, title="context parallel degree")
    ep: Number = default(1, title="expert parallel degree")
    sequence_parallel: Flag = default(False, title="sequence parallelism")
    recompute: Kind = default(Recompute.NONE, title="recomputation")
    zero: Number = default(0, title="ZeRO stage")
    zero_bubble: Flag = default(False, title="schedule")


TITLES = {one.name: one.metadata["title"] for one in fields(Dimensions) if one.metadata}


@dataclass(frozen=True)
class Layout(Dimensions[int, bool, Recompute]):
    """One parallel layout."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Return micro-batches per iteration and data-parallel replica."""
        return -(-self.global_batch // (self.micro_batch * self.dp))

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"mb{self.micro_batch}"]
        parts += [
            f"{name}{value}" for name, value in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp)) if value > 1
        ]
        parts += ["sp"] * self.sequence_parallel + [f"zero{self.zero}"] * (self.zero > 0) + ["zb"] * self.zero_bubble
        return "-".join([*parts, f"recompute-{self.recompute.name.lower()}"])


@dataclass(frozen=True)
class Layouts(Dimensions[Column, Column, Column], Columns):
    """Layouts as columns."""

    def __len__(self) -> int:
        return max(int(getattr(self, field.name).size) for field in fields(self))

    def row(self, index: int) -> Layout:
        values = {f.name: int(np.broadcast_to(getattr(self, f.name), (len(self),))[index]) for f in fields(self)}
        flags = {name: bool(values.pop(name)) for name in ("sequence_parallel", "zero_bubble")}
        return Layout(**{**values, "recompute": Recompute(values["recompute"])}, **flags)  # type: ignore[arg-type]

    @property
    def num_gpus(self) -> Column:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> Column:
        return np.ceil(self.global_batch / (self.micro_batch * self.dp))


# -- a layout as text: what ``str(layout)`` prints, read again ---------------------------------------------------------

_NAMES = {"tp": "tp", "pp": "pp", "dp": "dp", "mb": "micro_batch", "cp": "cp", "ep": "ep", "vpp": "vpp", "zero": "zero"}
_NUMBER = re.compile(r"([a-z]+)=?(\d{1,9})")
EXAMPLE = "tp8-pp4-dp2-mb1-sp-zero1-recompute-full"


def parse_layout(text: str, global_batch: int) -> Layout:
    """Parse ``tp8-pp4-dp2-mb1-vpp2-sp-zero1-zb-recompute-full``, or with commas and ``=``. Raises UsageError."""
    values: dict[str, int] = {}
    recompute, flags = Recompute.NONE, set[str]()
    words = [word for word in re.split(r"[-,\s]+", text.strip().lower()) if word]
    for place, word in enumerate(words):
        number = _NUMBER.fullmatch(word)
        if word in ("sp", "zb", "recompute"):
            flags.add(word)
        elif place and words[place - 1] == "recompute" and word.upper() in Recompute.__members__:
            recompute = Recompute[word.upper()]
        elif number and number[1] in _NAMES and number[1] not in values:
            values[number[1]] = int(number[2])
        else:
            raise UsageError(
                f"layout {printable(repr(text), 80)}: {printable(repr(word), 40)} is no part of one such as {EXAMPLE}"
            )
    if any(value < 1 for name, value in values.items() if name != "zero") or values.get("zero", 0) > 3:
        raise UsageError(f"layout {printable(repr(text), 80)}: degrees are 1 or more, zero is 0 to 3")
    numbers = {_NAMES[name]: value for name, value in values.items()}
    return Layout(
        **numbers, global_batch=global_batch, sequence_parallel="sp" in flags, zero_bubble="zb" in flags,
        recompute=recompute,
    )  # fmt: skip
