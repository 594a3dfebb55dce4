"""Which nodes vote, and what a quorum is. Pure.

The **voters** are first the nodes of the allocation; later all that a controller has admitted. The list changes only by
way of a *joint* membership, in which the old voters and the new ones each need a quorum (as in Raft, Ongaro and
Ousterhout 2014, section 6), so two sides that know different lists never both have one.

A quorum is more than half. Exactly half needs the group's witness as well, a file in the run directory that one node of
one side can create.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.protocol.message_parts import Count
from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList, nodes_of, set_of

NEVER = float("-inf")
WitnessName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}\.[0-9]{1,18}\Z")]


class VoterGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of voters, as a host list, and the name of its witness."""

    names: str
    witness: WitnessName

    def __post_init__(self) -> None:
        """Refuse, when it is decoded, what is no host list."""
        try:
            nodes_of(self.names)
        except UsageError as error:
            raise ValueError(str(error)) from None


class Membership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The voters of a version, in the order in which they take over. A node list's number is the port to reach it by.

    ``version``: (epoch of the controller that made it, its count there); the later one holds. ``before``: the groups
    that must agree too, until the membership is settled. ``witness``: that of the voters, named after the version in
    which they came together.
    """

    epoch: Count = 0
    number: Count = 0
    voters: NodeList = NodeList()
    before: tuple[VoterGroup, ...] = ()
    witness: WitnessName = "0.0"

    @property
    def version(self) -> tuple[int, int]:
        """Return which of two memberships is the later one, by comparison."""
        return (self.epoch, self.number)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return every group of voters in which a quorum is needed."""
        return (self.voters.nodes, *(nodes_of(group.names) for group in self.before))

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes that have a vote in any group."""
        return set_of(self.voters.names).union(*(set_of(group.names) for group in self.before))

    def endpoint(self, node: str) -> str:
        """Return where a voter's agent listens ("host:port"); "" if unknown."""
        for entry in self.voters.entries():
            if entry.node == node:
                return f"{entry.address}:{entry.number}" if entry.number else ""
        return ""


def first_membership(nodes: Collection[str]) -> Membership:
    """Return what every agent of a job knows at its start: the nodes of the allocation."""
    return Membership(0, 0, NodeList.of([NodeEntry(node, node, 0) for node in nodes]))


def next_membership(last: Membership, epoch: int, voters: NodeList, settled: bool) -> Membership:
    """Return the joint membership after ``last``; the groups before ``last`` still count unless it was settled."""
    number = last.number + 1 if last.epoch == epoch else 1
    groups = dict.fromkeys((VoterGroup(last.voters.names, last.witness), *(() if settled else last.before)))
    same = [group for group in groups if sorted(nodes_of(group.names)) == sorted(voters.nodes)]
    before = tuple(group for group in groups if group not in same)
    return Membership(epoch, number, voters, before, same[0].witness if same else f"{epoch}.{number}")


def settled(membership: Membership) -> Membership:
    """Return the same voters alone, once a quorum of every group has kept the joint membership."""
    return Membership(membership.epoch, membership.number + 1, membership.voters, witness=membership.witness)


def has_quorum(membership: Membership, supporters: Collection[str], witnessed: Iterable[Collection[str]] = ()) -> bool:
    """Return whether ``supporters`` are a quorum in every group; ``witnessed``: groups where half is enough."""
    halves = [frozenset(group) for group in witnessed]
    return all(
        len(group.intersection(supporters)) >= _needed(group, group in halves)
        for group in map(set_of, (membership.voters.names, *(group.names for group in membership.before)))
    )


def has_tie(membership: Membership, supporters: Collection[str]) -> bool:
    """Return whether ``supporters`` are a quorum with the witness, but not without it."""
    return not has_quorum(membership, supporters) and has_quorum(membership, supporters, membership.groups)


def witnesses_needed(membership: Membership, supporters: Collection[str]) -> tuple[str, ...]:
    """Return the witnesses that would make ``supporters`` a quorum, at present the first of them.

    Empty where they are a quorum already, or would not be one with any witness. The oldest group's comes first, since
    all competing sides know it.
    """
    if not has_tie(membership, supporters):
        return ()
    names = (membership.witness, *(group.witness for group in membership.before))
    groups = zip(reversed(names), reversed(membership.groups), strict=True)
    return tuple(name for name, group in groups if 2 * len(set(group).intersection(supporters)) == len(group))


def quorum_since(
    membership: Membership, supported: Callable[[str], float], witnessed: Iterable[Collection[str]] = ()
) -> float:
    """Return the latest time at which a quorum of every group supported; ``supported``: that time for each voter."""
    halves = [frozenset(group) for group in witnessed]
    since = float("inf")
    for group in membership.groups:
        times = sorted([supported(node) for node in group], reverse=True)
        needed = _needed(group, bool(halves) and frozenset(group) in halves)
        since = min(since, times[needed - 1] if 0 < needed <= len(times) else NEVER)
    return since


def silence_of_quorum(membership: Membership, silent_s: Mapping[str, float], witnessed: bool) -> float:
    """Return for how many seconds, at least, no controller can have had a quorum.

    ``silent_s``: for how long each voter heard none. Any quorum shares a voter with this one, so the quorum of the
    most silent voters tells it.
    """
    halves = membership.groups if witnessed else ()
    return max(0.0, quorum_since(membership, lambda node: silent_s.get(node, NEVER), halves))


def _needed(group: Collection[str], witnessed: bool) -> int:
    half, odd = divmod(len(group), 2)
    return half if witnessed and not odd and half else half + 1
