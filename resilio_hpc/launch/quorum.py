"""Who has a vote, and what a quorum is. Pure.

The **voters** are first the nodes of the allocation; later all that a controller has admitted. The list changes only
by way of a *joint* membership, in which the old voters and the new ones each need a quorum (as in Raft, Ongaro and
Ousterhout 2014, section 6), so two sides that know different lists never both have one.

A quorum is more than half. Exactly half needs the **witness**: a file that only one side can create
(``run_directory.claim_witness``). It stands for the halves of the membership under which it was claimed, and for no
later one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.message_parts import Count
from resilio_hpc.launch.roster import Entry, Roster, nodes_of, set_of

NEVER = float("-inf")


class Membership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The voters of a version, in the order in which they take over. A roster's number is the port to reach it by.

    ``version``: (epoch of the controller that made it, its count there); the later one holds. ``before``: host lists
    of the groups that must agree too, until the membership is settled.
    """

    epoch: Count = 0
    number: Count = 0
    voters: Roster = Roster()
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no host list where it is decoded."""
        try:
            for names in self.before:
                nodes_of(names)
        except UsageError as error:
            raise ValueError(str(error)) from None

    @property
    def version(self) -> tuple[int, int]:
        """Which of two memberships is the later one."""
        return (self.epoch, self.number)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Every group of voters in which a quorum is needed."""
        return (self.voters.nodes, *(nodes_of(names) for names in self.before))

    @property
    def nodes(self) -> frozenset[str]:
        """Everybody who has a vote in one group or another."""
        return set_of(self.voters.names).union(*(set_of(names) for names in self.before))

    def endpoint(self, node: str) -> str:
        """Where a voter's agent listens ("host:port"), "" when that is not known."""
        for entry in self.voters.entries():
            if entry.node == node:
                return f"{entry.address}:{entry.number}" if entry.number else ""
        return ""


def first_membership(nodes: Collection[str]) -> Membership:
    """What every agent of a job knows at its start: the nodes of the allocation."""
    return Membership(0, 0, Roster.of([Entry(node, node, 0) for node in nodes]))


def next_membership(last: Membership, epoch: int, voters: Roster, settled: bool) -> Membership:
    """The membership after ``last``, which still counts, and with it, unless it was settled, what came before it."""
    number = last.number + 1 if last.epoch == epoch else 1
    groups = [last.voters.names, *(() if settled else last.before)]
    before = tuple(dict.fromkeys(names for names in groups if sorted(nodes_of(names)) != sorted(voters.nodes)))
    return Membership(epoch, number, voters, before)


def settled(membership: Membership) -> Membership:
    """The same voters alone, once a quorum of every group has kept the joint membership."""
    return Membership(membership.epoch, membership.number + 1, membership.voters)


def has_quorum(membership: Membership, supporters: Collection[str], witnessed: Iterable[Collection[str]] = ()) -> bool:
    """Whether ``supporters`` are a quorum in every group; ``witnessed``: groups for which exactly half is enough."""
    halves = [frozenset(group) for group in witnessed]
    return all(
        len(group.intersection(supporters)) >= _needed(group, group in halves)
        for group in map(set_of, (membership.voters.names, *membership.before))
    )


def has_tie(membership: Membership, supporters: Collection[str]) -> bool:
    """Whether ``supporters`` would be a quorum with the witness's help, but are none without it."""
    return not has_quorum(membership, supporters) and has_quorum(membership, supporters, membership.groups)


def quorum_since(
    membership: Membership, supported: Callable[[str], float], witnessed: Iterable[Collection[str]] = ()
) -> float:
    """The latest time at which a quorum of every group stood with us, when ``supported`` tells it of each voter."""
    halves = [frozenset(group) for group in witnessed]
    since = float("inf")
    for group in membership.groups:
        times = sorted((supported(node) for node in group), reverse=True)
        needed = _needed(group, frozenset(group) in halves)
        since = min(since, times[needed - 1] if 0 < needed <= len(times) else NEVER)
    return since


def silence_of_quorum(membership: Membership, silent_s: Mapping[str, float], witnessed: bool) -> float:
    """For how long at least no controller can have had a quorum, when these voters heard none for so long.

    Any quorum shares a voter with ours, so the most silent of our voters that make one tell it.
    """
    halves = membership.groups if witnessed else ()
    return max(0.0, quorum_since(membership, lambda node: silent_s.get(node, NEVER), halves))


def _needed(group: Collection[str], witnessed: bool) -> int:
    half, odd = divmod(len(group), 2)
    return half if witnessed and not odd and half else half + 1
