"""Parts of messages between nodes: bounded numbers, names and times, and the members of a round.

Decoding enforces the bounds, whatever the sender: numbers cannot overflow, times can be compared (NaN cannot), and a
node's name is a plain host name that fits into a host list.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight
from resilio_hpc.launch.protocol.node_list import HOST_NAME, NodeEntry, NodeList

PORT_NUMBER = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
MOST_LOG = 500  # characters
MOST_GROUPS = 8
Count = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)]  # -1: unknown, or none
COUNTED = 1 << 48  # a counter below this never leaves the range of Count
Life = tuple[Count, Count]  # (epoch, round) of a start of ranks; a round number alone may repeat
NO_LIFE: Life = (-1, -1)
Counted = Annotated[int, msgspec.Meta(ge=-1, lt=COUNTED)]
Slots = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # ranks of one node
Code = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
Stamp = Annotated[float, msgspec.Meta(le=1e12)]  # may be NEVER
Node = Annotated[str, msgspec.Meta(pattern=HOST_NAME)]
Address = Annotated[str, msgspec.Meta(pattern=r"^\S{0,255}\Z")]
Endpoint = Annotated[str, msgspec.Meta(pattern=rf"^(\S{{1,255}}:{PORT_NUMBER})?\Z")]


class Struct(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged by its name, strict."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's place in a round. Its ranks are ``first_rank … first_rank + local_world_size - 1``."""

    node: Node
    node_rank: Count
    address: Address
    local_world_size: Count
    first_rank: Count

    @property
    def ranks(self) -> range:
        """Return the node's ranks."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole snapshot in a node's memory.

    ``is_copy``: of a rank that runs on another node. ``is_shared``: all ranks have these tensors, so worlds of other
    sizes can go on from it.
    """

    rank: Count
    step: Count
    world_size: Count
    is_copy: bool = False
    is_shared: bool = False


class MissingSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank whose node lacks its snapshot. ``endpoint``: a replicator that has it; "": the shared directory has it."""

    rank: Count
    endpoint: Endpoint


class Partner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node whose snapshots another node copies: its ranks, and the endpoint of its replicator."""

    first_rank: Count
    ranks: Slots
    endpoint: Endpoint


class RankFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank failed.

    ``time``: Unix seconds; ``bad_copy``: of kind restore_failed, the copy not to restore again.

    ``kind``: exit, signal, early_exit, restore_failed; or, not caused by the rank: spawn, spawner_lost, store_lost,
    lease_ended. ``uncertain_s``: how wrong ``time`` may be on the controller's clock, -1: not known. ``log``: of a rank
    without a traceback, the line of its log that tells most. ``groups``: its communicators, and how many of their calls
    it had entered.
    """

    node: Node
    rank: Count
    local_rank: Count
    kind: str
    time: Seconds
    exit_code: Code | None = None
    signal: Code | None = None
    message: str = ""
    traceback: str = ""
    bad_copy: RestorePoint | None = None
    uncertain_s: Seconds = -1.0
    log: Annotated[str, msgspec.Meta(max_length=MOST_LOG)] = ""
    groups: Annotated[tuple[GroupSight, ...], msgspec.Meta(max_length=MOST_GROUPS)] = ()


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ended a round. ``rank``: -1 where it was the node itself, or its agent.

    ``reads_like_echo``: it was a broken connection or a timeout itself, for which no other cause is known. ``place``:
    the program's line that raised it, as ``train.py:88``; "" where it left no traceback.
    """

    node: Node
    rank: Count
    reads_like_echo: bool = False
    place: str = ""


class RoundState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Soft state that agents keep, and give to the next controller."""

    epoch: Count
    round: Count
    world: NodeList  # the members in the order of their node ranks, each with its number of ranks
    restarts: Count
    without_progress: Count
    committed: tuple[Count, ...]
    lost: tuple[Node, ...] = ()
    bad_copies: tuple[RestorePoint, ...] = ()
    left: tuple[Node, ...] = ()
    steps_reported: bool = False
    losses: tuple[tuple[Node, Count], ...] = ()  # how often each node was lost
    broken_by: str = ""  # the failure that ended the round before (``repeated_failure``)
    suspects: tuple[Node, ...] = ()  # nodes whose own fault ended a round
    flagged: tuple[Node, ...] = ()  # nodes that a test found bad or slow
    verified: tuple[Count, ...] = ()  # committed steps after which replicas were equal
    old_layout_until: Count = -1  # steps in memory up to here may be of another layout than the round's

    @property
    def life(self) -> Life:
        """Return which life of the ranks this is; later lives of the run compare as larger."""
        return (self.epoch, self.round)

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the members one by one."""
        return members_of(self.world)

    def member(self, node: str) -> Member | None:
        """Return the member on a node, if it takes part."""
        return _by_node(self.world).get(node)

    @property
    def may_be_counted_on(self) -> bool:
        """Return whether rounds, restarts and losses can be counted on from here without an overflow."""
        counts = (self.epoch, self.round, self.restarts, self.without_progress, *(count for _, count in self.losses))
        return max(counts) < COUNTED


@lru_cache(maxsize=16)
def members_of(world: NodeList) -> tuple[Member, ...]:
    """Return a round's members from their encoded form."""
    members: list[Member] = []
    first_rank = 0
    for node_rank, (node, address, slots) in enumerate(world.entries()):
        members.append(Member(node, node_rank, address, slots, first_rank))
        first_rank += slots
    return tuple(members)


@lru_cache(maxsize=16)
def _by_node(world: NodeList) -> dict[str, Member]:
    return {member.node: member for member in members_of(world)}


def world_of(members: Sequence[Member]) -> NodeList:
    """Return the encoded form of a round's members."""
    return NodeList.of([NodeEntry(member.node, member.address, member.local_world_size) for member in members])
