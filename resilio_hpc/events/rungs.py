"""The rungs of the recovery ladder, by their names in the ledger, and what each is called in a text."""

from __future__ import annotations

from enum import Enum


class Rung(Enum):
    """What is done about a failure, lowest rung first. The value is in the ledger, ``words`` in texts."""

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
    """Return what a rung of the ledger is called in a text. Another version's rung is called by its name."""
    return _WORDS.get(name, name.replace("_", " "))


_WORDS = {rung.value: rung.words for rung in Rung}
