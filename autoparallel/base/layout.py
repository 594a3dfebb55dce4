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
Order = TypeVar("Order")
Place = TypeVar("Place")


class Recompute(IntEnum):
    """Which activations are computed again in the backward pass instead of being kept."""

    NONE = 0
    SELECTIVE = 1  # the attention core only (arXiv:2205.05198)
    FULL = 2  # every layer from its input
    ALTERNATE = 3  # every second layer, or as much of every layer (torchtitan "selective")


class Schedule(IntEnum):
    """The order of forward and backward passes in a pipeline; ``schedule.py`` has their times."""

    ONE_F_ONE_B = 0  # interleaved where vpp > 1 (arXiv:2104.04473)
    GPIPE = 1  # all forward passes first (arXiv:1811.06965)
    ZBH1 = 2  # gradients of weights fill the bubble, memory of 1F1B (arXiv:2401.10241)
    ZB1P = 3  # the same, order found by a program
    ZB2P = 4  # with twice the activations
    ZBV = 5  # two chunks in a V
    DUALPIPE = 6  # from both ends (arXiv:2412.19437)


class Offload(IntEnum):
    """What lies in the host's memory instead of the GPU's, as bits."""

    NONE = 0
    OPTIMIZER = 1  # its states and its step (arXiv:2101.06840); with ZeRO-2 and 3 gradients, with FSDP parameters too
    ACTIVATIONS = 2  # copied there in the forward pass, and back in the backward pass
    BOTH = 3


@dataclass(frozen=True)
class Dimensions(Generic[Number, Flag, Kind, Order, Place]):
    """The one list of what makes a layout. GPUs: tp · pp · dp · cp; expert parallelism (ep) lies inside dp · cp · tp.

    ``zero``: what is sharded over dp: 1 optimizer, 2 and gradients, 3 and parameters (FSDP).
    ``replicas``: groups of ranks that each shard for themselves (HSDP); they lie inside dp.
    ``etp``: ranks that share an expert (0: as the framework does it). ``head_layers``: so many layers the loss head
    counts as when layers are spread over stages (0: even stages; see ``cost.stage_layers``).
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
    etp: Number = default(0, title="expert tensor parallel degree")
    head_layers: Number = default(0, title="layers of the last stage")
    sequence_parallel: Flag = default(False, title="sequence parallelism")
    recompute: Kind = default(Recompute.NONE, title="recomputation")
    zero: Number = default(0, title="ZeRO stage")
    replicas: Number = default(1, title="sharding")
    schedule: Order = default(Schedule.ONE_F_ONE_B, title="schedule")
    offload: Place = default(Offload.NONE, title="offload")


_FIELDS = tuple(one.name for one in fields(Dimensions))
TITLES = {one.name: one.metadata["title"] for one in fields(Dimensions) if one.metadata}


@dataclass(frozen=True)
class Layout(Dimensions[int, bool, Recompute, Schedule, Offload]):
    """One parallel layout."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Return micro-batches per iteration and data-parallel replica."""
        return -(-self.global_batch // (self.micro_batch * self.dp))

    @property
    def rounds(self) -> int:
        """Return rounds of an interleaved pipeline (``schedule.rounds``)."""
        return max(self.micro_batches // self.pp, 1)

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", f"mb{self.micro_batch}"]
        parts += [
            f"{name}{value}"
            for name, value in (("cp", self.cp), ("ep", self.ep), ("vpp", self.vpp), ("rep", self.replicas))
            if value > 1
        ]
        parts += [f"{name}{value}" for name, value in (("etp", self.etp), ("head", self.head_layers)) if value]
        parts += ["sp"] * self.sequence_parallel + [f"zero{self.zero}"] * (self.zero > 0)
        parts += [self.schedule.name.lower()] * (self.schedule != Schedule.ONE_F_ONE_B)
        parts += [f"offload-{self.offload.name.lower()}"] * (self.offload != Offload.NONE)
        return "-".join([*parts, f"recompute-{self.recompute.name.lower()}"])


@dataclass(frozen=True)
class Layouts(Dimensions[Column, Column, Column, Column, Column], Columns):
    """Layouts as columns."""

    def __len__(self) -> int:
        return max(int(getattr(self, field.name).size) for field in fields(self))

    def row(self, index: int) -> Layout:
        columns = ((name, getattr(self, name)) for name in _FIELDS)
        values = {name: int(column[index if column.size > 1 else 0]) for name, column in columns}
        sharded = bool(values.pop("sequence_parallel"))
        kinds = {"recompute": Recompute(values.pop("recompute")), "schedule": Schedule(values.pop("schedule"))}
        kinds["offload"] = Offload(values.pop("offload"))
        return Layout(**values, **kinds, sequence_parallel=sharded)  # type: ignore[arg-type]

    @property
    def num_gpus(self) -> Column:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> Column:
        return np.ceil(self.global_batch / (self.micro_batch * self.dp))


# -- a layout as text: what ``str(layout)`` prints, read again ---------------------------------------------------------

_NAMES = {"tp": "tp", "pp": "pp", "dp": "dp", "mb": "micro_batch", "cp": "cp", "ep": "ep", "vpp": "vpp", "zero": "zero",
          "rep": "replicas", "etp": "etp", "head": "head_layers"}  # fmt: skip
_NUMBER = re.compile(r"([a-z]+)=?(\d{1,9})")
EXAMPLE = "tp8-pp4-dp2-mb1-sp-zero1-recompute-full"


def parse_layout(text: str, global_batch: int) -> Layout:
    """Parse ``tp8-pp4-dp2-mb1-vpp2-sp-zero1-recompute-full``, also with commas and ``=``. Raises UsageError.

    A schedule other than 1F1B is a word of its own, such as ``dualpipe``.
    """
    values: dict[str, int] = {}
    recompute, offload, flags, orders = Recompute.NONE, Offload.NONE, set[str](), list[Schedule]()
    words = [word for word in re.split(r"[-,\s]+", text.strip().lower()) if word]
    for place, word in enumerate(words):
        number = _NUMBER.fullmatch(word)
        if word == "fsdp" or (number and number[1] == "hsdp"):  # names of torch for ZeRO-3, and of it within groups
            values |= {"zero": 3, **({"rep": int(number[2])} if number else {})}
        elif word in ("sp", "recompute", "offload"):
            flags.add(word)
        elif word.upper() in Schedule.__members__ and not orders:
            orders.append(Schedule[word.upper()])
        elif place and words[place - 1] == "recompute" and word.upper() in Recompute.__members__:
            recompute = Recompute[word.upper()]
        elif place and words[place - 1] == "offload" and word.upper() in Offload.__members__:
            offload = Offload[word.upper()]
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
        **numbers, global_batch=global_batch, sequence_parallel="sp" in flags,
        schedule=orders[0] if orders else Schedule.ONE_F_ONE_B, recompute=recompute, offload=offload,
    )  # fmt: skip
