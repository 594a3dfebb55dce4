"""On which connection to answer an agent: it hangs up and calls again, and what it said before may come afterwards.

A connection is called ``node/incarnation/number``. Of those of one process the highest number is the newest: when a
cable is plugged in again, TCP delivers what was said on connections that nobody listens to any more, and whatever is
answered there is lost.
"""

from __future__ import annotations

MAX_CALLERS = 25_000  # agents and orphans whom we could answer


class Callers:
    """The newest connection of each node."""

    def __init__(self) -> None:
        self._names: dict[str, bytes] = {}  # whoever spoke last is last

    def heard(self, node: str, name: bytes) -> None:
        """A message of ``node`` came on the connection ``name``. Whom we have not heard for longest is forgotten when
        there are too many."""
        known = self._names.pop(node, None)
        self._names[node] = known if known is not None and _is_older(name, known) else name
        if len(self._names) > MAX_CALLERS:
            del self._names[next(iter(self._names))]

    def name_of(self, node: str) -> bytes | None:
        """The connection to answer on; None for one that never called."""
        return self._names.get(node)


def speaks_for(name: bytes, node: str) -> bool:
    """Whether a connection is that node's: a peer cannot flood us with others' names."""
    return name.partition(b"/")[0] == node.encode()


def _is_older(name: bytes, known: bytes) -> bool:
    process, _, number = name.rpartition(b"/")
    known_process, _, known_number = known.rpartition(b"/")
    numbered = number.isdigit() and known_number.isdigit()
    return numbered and process == known_process and int(number) < int(known_number)
