"""What ranks have called, by communicator."""

from __future__ import annotations

import msgspec


class CollectiveCall(msgspec.Struct, frozen=True):
    """A call of a communication library.

    ``sequence`` counts the calls of a communicator from 1. ``shape``: what all ranks must agree on, such as dtype and
    sizes. ``peer``: the other rank of a send or receive, -1 for a collective. ``place``: the program's line, if known.
    ``blocks``: the program's main thread waits for it; else it goes on beside the program. ``awaited``: some thread
    waits for it, or may do so unseen.
    """

    sequence: int
    op: str
    shape: str = ""
    completed: bool = False
    peer: int = -1
    place: str = ""
    blocks: bool = True
    awaited: bool = True

    @property
    def signature(self) -> str:
        """Return what has to be the same on all ranks."""
        return f"{self.op} {self.shape}".strip()


class RankCalls(msgspec.Struct, frozen=True):
    """The calls of one rank. ``calls``: by communicator, the oldest first; a ring may have dropped older ones."""

    rank: int
    calls: dict[str, list[CollectiveCall]]

    def waits_in(self, beside: bool = False) -> list[tuple[str, CollectiveCall]]:
        """Return the calls that it has entered and not completed, the first of each communicator.

        ``beside``: those, too, that go on beside the program. Of these all are given: the end of few of them is seen.
        """
        found = []
        for communicator, calls in self.calls.items():
            waiting = [call for call in calls if not call.completed and (call.blocks or (beside and call.awaited))]
            here = [(communicator, call) for call in waiting]
            found += here if beside else here[:1]
        return found

    def entered(self, communicator: str) -> int:
        """Return the number of the last call that it has entered, 0 without any."""
        return max((call.sequence for call in self.calls.get(communicator, []) if call.peer < 0), default=0)

    def call(self, communicator: str, sequence: int) -> CollectiveCall | None:
        """Return one call, None where it is not known."""
        calls = self.calls.get(communicator, [])
        return next((call for call in calls if call.sequence == sequence and call.peer < 0), None)
