"""Whether an error text shows a device, a disk or a peer to be at fault."""

from __future__ import annotations

import functools

from resilio_hpc.diagnose.causes.log_line import stated
from resilio_hpc.diagnose.causes.pattern_table import FailurePattern, FaultOf, find

MOST_LINES = 2000
"""Of a longer text the end is read."""


@functools.lru_cache(maxsize=32)
def fault_in(text: str, fault: FaultOf) -> tuple[FailurePattern, str] | None:
    """Return the first line of a text that shows this fault, as its pattern and what it states; None without any."""
    for line in text.splitlines()[-MOST_LINES:]:
        statement = stated(line)
        pattern = find(statement)
        if pattern is not None and pattern.fault is fault:
            return pattern, statement
    return None


def prepare() -> None:
    """Read the table, which takes some 50 ms, and compile what a lost peer asks for, before the first failure does."""
    find("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
