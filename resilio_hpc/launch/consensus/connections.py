"""The connection on which to answer an agent that reconnects. Messages of an older connection may arrive later.

A connection is called ``node/boot/nanoseconds``, after the moment at which it was opened. Of those of one boot the
latest is the newest, whichever process opened it. After a link is back or an agent was killed, TCP delivers messages of
connections that no process reads any more; an answer there is lost.
"""

from __future__ import annotations

import secrets
import time

from resilio_hpc.prolog_epilog.base.node import boot_id

MAX_CALLERS = 25_000  # agents that can be answered


class Names:
    """Names for one process's connections. Each is used once: a listener may not know yet that the last one closed."""

    def __init__(self, node: str) -> None:
        self._boot = f"{node}/{boot_id() or secrets.token_hex(4)}".encode()

    def next(self) -> bytes:
        """Return the name of a new connection."""
        return b"%b/%d" % (self._boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME))


class Callers:
    """The newest connection of each node."""

    def __init__(self, most: int = MAX_CALLERS) -> None:
        """Keep at most ``most`` nodes; the one silent for longest is forgotten."""
        self._most = most
        self._names: dict[str, bytes] = {}  # in the order of the last message

    def heard(self, node: str, name: bytes) -> None:
        """Take note of a message of ``node`` on the connection ``name``."""
        known = self._names.pop(node, None)
        self._names[node] = known if known is not None and known != name and _is_older(name, known) else name
        if len(self._names) > self._most:
            del self._names[next(iter(self._names))]

    def name_of(self, node: str) -> bytes | None:
        """Return the connection to answer on, None for a node that never called."""
        return self._names.get(node)


def speaks_for(name: bytes, node: str) -> bool:
    """Return whether a connection belongs to that node, so that a peer cannot use other nodes' names."""
    return name.partition(b"/")[0] == node.encode()


def _is_older(name: bytes, known: bytes) -> bool:
    boot, _, opened = name.rpartition(b"/")
    known_boot, _, known_opened = known.rpartition(b"/")
    numbered = opened.isdigit() and known_opened.isdigit()
    return numbered and boot == known_boot and int(opened) < int(known_opened)
