"""The node's clock, as the kernel sees it: adjtimex(2), which needs no daemon and no network."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.base.check import Absent, Fault, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView

_STA_UNSYNC = 0x0040
_TIME_ERROR = 5


class _Timex(ctypes.Structure):
    """struct timex of linux/timex.h on 64-bit machines, up to the fields that are read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


@dataclass(frozen=True)
class ClockState:
    """The clock. ``most_error_s``: its largest possible error, as the daemon that disciplines it says."""

    synchronised: bool
    most_error_s: float


def fetch(node: NodeView) -> ClockState:
    """Read the clock's state. Raises Unreadable."""
    captured = node.files.optional("/.adjtimex")  # a captured tree has adjtimex's output
    if captured is not None:
        return parse(captured)
    node.mark("adjtimex")
    found = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found))
    if state < 0:
        raise Unreadable(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return parse(f"{state} {found.status} {found.maxerror} {found.esterror}")


def parse(text: str) -> ClockState:
    """Parse ``state status maxerror esterror``. Raises Unreadable. Pure."""
    words = text.split()
    try:
        state, status, most, _ = (int(word) for word in words)
    except ValueError as error:
        raise Unreadable(f"not what adjtimex says: {text[:60]!r}") from error
    return ClockState(not (state == _TIME_ERROR or status & _STA_UNSYNC), most / 1e6)


def synchronised(clock: ClockState, limits: Thresholds) -> Iterable[Fault]:
    if not clock.synchronised:
        yield Fault("the clock is not synchronised (adjtimex): is chronyd or ntpd running?")


def error(clock: ClockState, limits: Thresholds) -> Iterable[Fault]:
    """Yield a fault for a clock with a large error.

    munge refuses 300 s; comparisons of many nodes' time stamps fail long before.
    """
    if not clock.synchronised:
        raise Absent("the clock is not synchronised")
    if clock.most_error_s > limits.number("most_s"):
        yield Fault(f"the clock may be wrong by {clock.most_error_s:.3f} s")
