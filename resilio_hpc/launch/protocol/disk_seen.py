"""An agent's message to the controller about its node's own disk."""

from __future__ import annotations

from typing import Annotated

import msgspec

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.launch.protocol.message_parts import Count, Node, Struct

Copies = Annotated[tuple[OwnCopy, ...], msgspec.Meta(max_length=8)]


class DiskSeen(Struct, frozen=True):
    """Which committed steps the sender's own disk holds, and of which ranks."""

    node: Node
    epoch: Count
    copies: Copies = ()
