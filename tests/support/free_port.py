"""A port for a program that has to be given one."""

from __future__ import annotations

import contextlib
import secrets
import socket


def free_port() -> int:
    """Return a port that is free now, below those that the kernel gives to programs that name none."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
