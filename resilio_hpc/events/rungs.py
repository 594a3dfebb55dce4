"""The rungs of the recovery ladder, with their names in the ledger and their words in texts."""

from __future__ import annotations

from enum import Enum


class Rung(Enum):
    """The response to a failure, lowest rung first. The value is in the ledger, ``words`` in texts."""

    RESTART_RANK = ("restart_rank", "start the failed rank again")
    RESTART = ("restart_ranks", "restart the ranks where they were")
    REPLACE = ("replace_node", "let a spare node take over")
    SHRINK = ("shrink", "go on with fewer nodes")
    WAIT = ("wait_for_node", "wait for a node")
    NEXT_JOB = ("next_job", "leave the rest to the next job")
    STOP = ("stop", "give up")

    words: str

    def __new__(cls, name: str, words: str) -> Rung:
        """Make a member of a row of this table."""
        rung = object.__new__(cls)
        rung._value_ = name
        rung.words = words
        return rung


def rung_words(name: str) -> str:
    """Return the words for a rung of the ledger. Another version's rung keeps its name."""
    return _WORDS.get(name, name.replace("_", " "))


_WORDS = {rung.value: rung.words for rung in Rung}
