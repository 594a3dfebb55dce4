"""A copy of a committed shard file on a node's own disk. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class OwnCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of ``ranks`` ranks from ``first_rank`` on, of a world of ``world_size``, at a committed step."""

    step: Number
    first_rank: Number
    ranks: Number
    world_size: Number
