"""On which connection to answer an agent: it hangs up and calls again, and what it said before may come afterwards.

A connection is called ``node/boot/nanoseconds``, after the moment at which it was opened. Of those of one boot the
latest is the newest, whichever process opened it: when a cable is plugged in again, or after an agent was killed, TCP
delivers what was said on connections that nobody listens to any more, and whatever is answered there is lost.
"""

from __future__ import annotations

import secrets
import time

from resilio_hpc.prolog_epilog.node import boot_id

MAX_CALLERS = 25_000  # agents and orphans whom we could answer


class Names:
    """Names for one process's connections. None is used twice: a listener may not know yet that the last one died."""

    def __init__(self, node: str) -> None:
        self._boot = f"{node}/{boot_id() or secrets.token_hex(4)}".encode()

    def next(self) -> bytes:
        """Of a connection that is opened now."""
        return b"%b/%d" % (self._boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME))


class Callers:
    """The newest connection of each node."""

    def __init__(self, most: int = MAX_CALLERS) -> None:
        """Of more than ``most`` nodes whom we have not heard for longest is forgotten."""
        self._most = most
        self._names: dict[str, bytes] = {}  # whoever spoke last is last

    def heard(self, node: str, name: bytes) -> None:
        """A message of ``node`` came on the connection ``name``."""
        known = self._names.pop(node, None)
        self._names[node] = known if known is not None and _is_older(name, known) else name
        if len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def name_of(self, node: str) -> bytes | None:
        """The connection to answer on; None for one that never called."""
        return self._names.get(node)


def speaks_for(name: bytes, node: str) -> bool:
    """Whether a connection is that node's: a peer cannot flood us with others' names."""
    return name.partition(b"/")[0] == node.encode()


def _is_older(name: bytes, known: bytes) -> bool:
    boot, _, opened = name.rpartition(b"/")
    known_boot, _, known_opened = known.rpartition(b"/")
    numbered = opened.isdigit() and known_opened.isdigit()
    return numbered and boot == known_boot and int(opened) < int(known_opened)
