"""States of nodes and jobs: one base state and any number of flags. Pure.

An unknown state is UNKNOWN, which is never taken for a failure nor for health.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

UNKNOWN = "UNKNOWN"
NODE_BASES = frozenset({"ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED"})
JOB_BASES = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING",
        "PREEMPTED", "RUNNING", "SUSPENDED", "TIMEOUT",
    }
)  # fmt: skip
# sinfo's one-word states for people (sinfo manual, NODE STATE CODES), and their meaning
_SHORT = {
    "ALLOC": ("ALLOCATED",),
    "ALLOCATED+": ("ALLOCATED", "COMPLETING"),
    "DRAINED": ("IDLE", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "INVAL": ("IDLE", "INVALID_REG"),
    "MIX": ("MIXED",),
}
# the mark that follows such a word (same manual)
_MARKS = {
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN",
    "$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED",
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """A base and any flags beside it, unknown ones too."""

    base: str = UNKNOWN
    flags: frozenset[str] = frozenset()

    @property
    def known(self) -> bool:
        return self.base != UNKNOWN

    def __str__(self) -> str:
        return "+".join([self.base, *sorted(self.flags)])


class NodeState(State):
    """``base``: one of NODE_BASES or UNKNOWN; ``flags``: DRAIN, NOT_RESPONDING, PLANNED …"""

    @property
    def drain(self) -> bool:
        """Return whether no new job is started here (DRAIN), whatever still runs."""
        return "DRAIN" in self.flags

    @property
    def in_service(self) -> bool:
        """Return whether Slurm may start jobs here, now or as soon as the node answers again. False when unknown."""
        return self.base in ("IDLE", "ALLOCATED", "MIXED") and not self.flags & {"DRAIN", "FAIL"}


class JobState(State):
    """``base``: one of JOB_BASES or UNKNOWN; ``flags``: COMPLETING, CONFIGURING, REQUEUED …"""

    @property
    def ended(self) -> bool:
        """Return whether it has ended, well or not, by Slurm's answer. False when unknown."""
        return self.known and self.base not in ("PENDING", "RUNNING", "SUSPENDED")


def node_state(words: Iterable[str]) -> NodeState:
    """Return the state of ``["IDLE", "DRAIN"]``, ``["idle+drain"]``, ``["mixed*"]``. Two bases at once are UNKNOWN."""
    return _node_state(tuple(words))


@lru_cache(maxsize=4096)  # thousands of nodes are in a few states
def _node_state(words: tuple[str, ...]) -> NodeState:
    base, flags = _split([part for word in _parts(words) for part in _plain(word)], NODE_BASES)
    return NodeState(base, flags)


def job_state(words: Iterable[str]) -> JobState:
    """Return the state of ``["RUNNING", "COMPLETING"]`` or ``["CANCELLED"]``.

    ``COMPLETING`` and similar flags may stand alone in squeue's one word: then the base is not known.
    """
    base, flags = _split(_parts(words), JOB_BASES)
    return JobState(base, flags)


def _parts(words: Iterable[str]) -> list[str]:
    return [part for word in words for part in word.strip().upper().split("+") if part]


def _plain(word: str) -> tuple[str, ...]:
    mark = _MARKS.get(word[-1])
    plain = word[:-1] if mark else word
    return (*_SHORT.get(plain, (plain,)), *([mark] if mark else []))


def _split(words: Iterable[str], bases: frozenset[str]) -> tuple[str, frozenset[str]]:
    seen = set(words)
    found = seen & bases
    base = found.pop() if len(found) == 1 else UNKNOWN
    return base, frozenset(seen - bases - {UNKNOWN, ""})
