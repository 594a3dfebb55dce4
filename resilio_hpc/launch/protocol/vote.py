"""Records of an election: on a node's disk, in the run directory, and for the controller that won."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from resilio_hpc.launch.protocol.membership import Membership


class VoteRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that survives an agent: the voters, and the epoch that this node voted for."""

    membership: Membership
    promised: int = 0
    promised_to: str = ""


class EpochRecord(Struct, frozen=True):
    """Content of an ``epoch.N`` file. ``job``: which job's nodes it belongs to."""

    epoch: int
    node: str
    endpoint: str
    job: str


class Term(Struct, frozen=True):
    """A won election.

    ``witnessed``: with half of the votes and the witness; ``silent_s``: for so long no controller can have had a
    quorum; ``first``: the job's first epoch, claimed by its file and without votes.
    """

    epoch: int
    node: str
    endpoint: str
    membership: Membership
    witnessed: bool = False
    silent_s: float = 0.0
    supporters: frozenset[str] = frozenset()
    first: bool = False
