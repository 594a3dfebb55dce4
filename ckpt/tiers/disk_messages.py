"""Messages of an agent to its disk server (a JSON line), and of a reader to another node's disk server."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from resilio_hpc.ckpt.format.manifest import Count
from resilio_hpc.core.json_lines import LineDecoder
from resilio_hpc.core.wire import Codec

PIECE_BYTES = 1 << 20
"""The most that is sent in one go."""
MAX_BYTES = 64 << 20
"""Of one request."""


class ServeDisk(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """agent → server, first.

    Serve copies of what is committed in ``checkpoints`` from ``local`` to callers that have the key.
    """

    key: bytes
    local: str
    checkpoints: str


class Copy(NamedTuple):
    """Which copy of a shard file: of this commit."""

    step: int
    epoch: int
    round: int
    file: str
    size_bytes: int


class Read(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Send these (offset, size) of a copy. Answer: "", and then the bytes in pieces; or why not."""

    copy: Copy
    extents: list[tuple[Count, Count]]


class Remove(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """This copy does not match what was committed. No answer."""

    copy: Copy


BUSY = "busy"
"""The answer to who should read elsewhere, and ask no more."""

asking: Codec[Read | Remove] = Codec(Read | Remove)
decode_serve = LineDecoder[ServeDisk](ServeDisk, "a request to the disk giver").decode
