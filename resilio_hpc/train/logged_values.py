"""The values that a script logs, on their way to the launcher: at most once a second, and never waited for.

A number on a GPU is copied without a wait: the copy is begun in one call, and sent by a later one that finds it there.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from resilio_hpc.core.rank_link import ValuesLogged

EVERY_S = 1.0
SUMMED = ("tokens", "samples")  # amounts of a step: their sum over time is the throughput
MOST_VALUES = 8
LONGEST_NAME = 32
_NOT_A_NUMBER = (TypeError, ValueError, OverflowError, RuntimeError, AttributeError)  # of any object's own __float__

Offer = Callable[[ValuesLogged], None]


class _Copy:
    """A number of a device on its way to this machine's memory."""

    def __init__(self, value: Any) -> None:
        torch = sys.modules["torch"]
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.detach().reshape(()), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(value.device))

    def is_there(self) -> bool:
        return bool(self._event.query())

    def number(self) -> float:
        return float(self._host)


class LoggedValues:
    """Takes values after each step of one rank. ``offer``: sends a message, or drops it where it would wait."""

    def __init__(self, offer: Offer, clock: Callable[[], float] = time.monotonic) -> None:
        self._offer, self._clock = offer, clock
        self._sums: dict[str, float] = {}
        self._begun = clock()
        self._due = -math.inf
        self._step = 0
        self._pending: dict[str, float | _Copy] = {}
        self._newest: tuple[int, dict[str, object]] = (0, {})

    def take(self, step: int, values: Mapping[str, object]) -> None:
        """Take the values of the step with which ``step`` steps are complete. Raises nothing."""
        for name in SUMMED:
            if name in values and (amount := _number(values[name])) is not None and 0.0 <= amount < math.inf:
                self._sums[name] = self._sums.get(name, 0.0) + amount
        named = [(name, value) for name, value in values.items() if name not in SUMMED][:MOST_VALUES]
        now = self._clock()
        self._newest = step, {name: _detached(value) for name, value in named}
        if now < self._due:
            return
        if not self._pending:
            for name, value in named:
                found = _begun(value)
                if found is not None:
                    self._pending[str(name)[:LONGEST_NAME]] = found
            self._step = step
        if all(value.is_there() for value in self._pending.values() if isinstance(value, _Copy)):
            self._send(now)

    def end(self) -> None:
        """Send the values of the last step: training ends, so that a number on a GPU may be waited for."""
        self._step, values = self._newest
        found = {str(name)[:LONGEST_NAME]: _number(value, wait=True) for name, value in values.items()}
        self._pending = {name: value for name, value in found.items() if value is not None}
        self._send(self._clock(), last=True)

    def _send(self, now: float, last: bool = False) -> None:
        known = {name: v.number() if isinstance(v, _Copy) else v for name, v in self._pending.items()}
        finite = {name: value for name, value in known.items() if math.isfinite(value)}
        not_finite = tuple(name for name in known if name not in finite)
        if known or self._sums:
            seconds = now - self._begun
            self._offer(ValuesLogged(self._step, time.time(), seconds, finite, self._sums, not_finite, last))
        self._pending, self._sums = {}, {}
        self._begun, self._due = now, now + EVERY_S


def _begun(value: object) -> float | _Copy | None:
    """Return a number, or its copy that was begun; None for anything else."""
    if getattr(value, "is_cuda", False) is True:
        try:
            return _Copy(value) if value.numel() == 1 else None  # type: ignore[attr-defined]
        except _NOT_A_NUMBER:
            return None
    return _number(value)


def _detached(value: object) -> object:
    """Return a value without the graph behind it, which would stay in memory until the next step."""
    try:
        return value.detach() if getattr(value, "requires_grad", False) is True else value  # type: ignore[attr-defined]
    except _NOT_A_NUMBER:
        return None


def _number(value: object, wait: bool = False) -> float | None:
    """Return a number, also of numpy or of a tensor in this machine's memory; None for what is none.

    ``wait``: also of a tensor on a device.
    """
    if isinstance(value, str | bytes) or (not wait and getattr(value, "is_cuda", False) is True):
        return None
    try:
        plain = value.detach() if getattr(value, "requires_grad", False) is True else value  # type: ignore[attr-defined]
        return float(plain)  # type: ignore[arg-type]
    except _NOT_A_NUMBER:
        return None
