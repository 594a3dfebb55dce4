"""Which copy of a checkpoint is restored."""

from __future__ import annotations

from typing import Annotated

import msgspec

from resilio_hpc.core.tiers import Tier


class RestorePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The copy to restore. ``source``: MEMORY, of this node or of others, or COMMITTED."""

    source: Tier
    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
