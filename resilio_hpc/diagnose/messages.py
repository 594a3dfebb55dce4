"""Messages between the coordinator of a pair check and the checkers on the nodes (``core.wire``)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from resilio_hpc.core.wire import Codec
from resilio_hpc.diagnose.policy import PairPolicy

Text = Annotated[str, Meta(max_length=600)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Number = Annotated[int, Meta(ge=0, le=1_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Blocks = Annotated[tuple[Seconds, ...], Meta(max_length=100)]
Key = Annotated[str, Meta(max_length=512)]
Value = Annotated[bytes, Meta(max_length=65536)]
Phase = Literal["starting", "computing", "joining", "communicating"]
ProbeFault = Literal["not_ready", "crashed", "hung", "wrong_result", "failed"]


class Alive(msgspec.Struct, frozen=True, tag="alive", forbid_unknown_fields=True):
    """A checker's sign of life, repeated. ``ready``: its prober waits for an order; ``unable``: why it cannot work."""

    ready: bool
    unable: Text = ""


class Entered(msgspec.Struct, frozen=True, tag="entered", forbid_unknown_fields=True):
    """The prober has begun this phase of its order."""

    round: Number
    phase: Phase


class Put(msgspec.Struct, frozen=True, tag="put", forbid_unknown_fields=True):
    """The process group stores an address for its other half."""

    round: Number
    key: Key
    value: Value


class Get(msgspec.Struct, frozen=True, tag="want", forbid_unknown_fields=True):
    """The process group asks for a value of its other half; ``Given`` answers as soon as it exists."""

    round: Number
    key: Key


class Measured(msgspec.Struct, frozen=True, tag="measured", forbid_unknown_fields=True):
    """The order was carried out, and all results were right. Seconds per operation, block by block.

    ``delays``: of the collective, how long the node waited for a CPU; ``waited``: that share of its time while it
    computed.
    """

    round: Number
    device: Text
    compute: Blocks
    collective: Blocks
    delays: Blocks = ()
    waited: Seconds = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The order could not be carried out. ``phase``: as far as the prober had come."""

    round: Number
    phase: Phase
    fault: ProbeFault
    detail: Text
    compute: Blocks = ()
    device: Text = ""
    waited: Seconds = 0.0


class Order(msgspec.Struct, frozen=True, tag="order", forbid_unknown_fields=True):
    """Compute, then run collectives with the partner ("": none). Of two, ``rank`` is 0 or 1."""

    round: Number
    partner: Annotated[str, Meta(max_length=255)]
    rank: Annotated[int, Meta(ge=0, le=1)]


class Given(msgspec.Struct, frozen=True, tag="given", forbid_unknown_fields=True):
    """The answer to a request for a value."""

    round: Number
    key: Key
    value: Value


class Drop(msgspec.Struct, frozen=True, tag="drop", forbid_unknown_fields=True):
    """The partner has failed: give up the order."""

    round: Number


class CoordinatorAlive(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """The coordinator's sign of life."""


class Bye(msgspec.Struct, frozen=True, tag="bye", forbid_unknown_fields=True):
    """The check is over."""


FromNode = Alive | Entered | Put | Get | Measured | Failed
ToNode = Order | Given | Drop | CoordinatorAlive | Bye
FROM_NODE: Codec[FromNode] = Codec(FromNode)
TO_NODE: Codec[ToNode] = Codec(ToNode)


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checker's settings on its standard input, in one line of JSON.

    The secret is neither in an argument nor in an environment. ``node`` "": Slurm tells which one this is. ``threads``
    0: as many as the node has CPUs for this process. ``parent`` > 0: die with that process. ``start_checks``: a node in
    which the health checks find a fault cannot work.
    """

    secret: str
    endpoint: str
    node: str = ""
    threads: int = 0
    parent: int = 0
    start_checks: bool = False
    policy: PairPolicy
