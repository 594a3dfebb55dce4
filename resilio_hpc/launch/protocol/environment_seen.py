"""An agent's message to the controller about its node."""

from __future__ import annotations

from typing import Annotated

import msgspec

from resilio_hpc.launch.protocol.message_parts import Count, Node, Struct

Line = Annotated[str, msgspec.Meta(max_length=300)]
Lines = Annotated[tuple[Line, ...], msgspec.Meta(max_length=8)]
FactText = Annotated[str, msgspec.Meta(max_length=120)]
Facts = Annotated[dict[FactText, FactText], msgspec.Meta(max_length=40)]


class EnvironmentSeen(Struct, frozen=True):
    """What the sender's node is like. ``facts``: what should be the same on all nodes; ``notes``: what is short there.

    ``unfit``: why ranks cannot run there; ``first``: this was its first look.
    """

    node: Node
    epoch: Count
    facts: Facts
    unfit: Line = ""
    first: bool = True
    notes: Lines = ()
