"""Messages about a rank that starts again alone, in the round that goes on."""

from __future__ import annotations

from resilio_hpc.launch.protocol.message_parts import Count, Node, Seconds, Struct


class RestartRank(Struct, frozen=True):
    """controller → agent: start a rank that failed again. The other ranks of the round go on.

    ``restart``: how often it starts again in this round, this time included. An agent obeys each number once.
    """

    epoch: Count
    round: Count
    local_rank: Count
    restart: Count


class RankRestarted(Struct, frozen=True):
    """agent → controller: the rank runs again. ``seconds``: from its failure to its new process."""

    node: Node
    epoch: Count
    round: Count
    rank: Count
    restart: Count
    seconds: Seconds
