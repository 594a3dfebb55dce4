"""Fetches what a replica copy must keep: first the other snapshot's table, then the bytes that no snapshot here has."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from resilio_hpc.ckpt.replication.caller import SnapshotCaller, header_of
from resilio_hpc.ckpt.replication.messages import Want
from resilio_hpc.ckpt.replication.replica_copies import MOST_BYTES, Owned, ReplicaCopy, checked_table, compare
from resilio_hpc.core.errors import CheckpointError

MOST_RANGES = 20_000  # named in one message


class NoReplica(CheckpointError):
    """Raised where too much of a snapshot is on no other node."""


def fetch_replica(caller: SnapshotCaller, want: Want, mine: Sequence[Owned]) -> ReplicaCopy | None:
    """Return a copy of the snapshot, which relies on ``mine``; None: it was given up.

    Raises NoReplica, CheckpointError, WireError, OSError.
    """
    if not mine:
        raise CheckpointError(f"this node has no snapshot of step {want.step}")
    with caller.asked() as asked:
        have = caller.ask(asked, replace(want, table=True))
        if have is None:
            return None
        header = header_of(have, want)
        data = caller.bytes_of(have, header.table_size)
        if data is None:
            return None
        parts, ranges = compare(header, checked_table(header, data), mine)
        size = sum(size for _, size in ranges)
        if size > MOST_BYTES or len(ranges) > MOST_RANGES:
            raise NoReplica(
                f"{size / 1e6:.0f} MB of rank {want.rank}'s snapshot, in {len(ranges)} pieces, are on no other node: "
                "too much for a copy of what differs; --partner-copies copies all"
            )
        rest = caller.ask(asked, replace(want, ranges=tuple(ranges)))
        kept = None if rest is None else caller.bytes_of(rest, size)
    if rest is None or kept is None:
        return None
    if rest.header != have.header:
        raise CheckpointError(f"rank {want.rank} has saved again meanwhile")
    used = {part.holder for part in parts}
    return ReplicaCopy(have.header, header, parts, kept, [one.held for one in mine if one.held.rank in used])
