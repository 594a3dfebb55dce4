"""Which committed steps to keep (OPS-7): the last N, every K-th, none too old, none beyond the space for them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from resilio_hpc.core.errors import UsageError

_GB = 1e9


def is_number(value: object, above: float) -> bool:
    """Return whether it is a finite number above that one; numpy's are numbers, True is not."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return math.isfinite(number) and number > above and not isinstance(value, bool | str | bytes)


def _is_whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


class CommittedStep(NamedTuple):
    """A committed step. ``committed``: Unix time of its commit.

    ``damaged``: a restore or ``resilio ckpt verify`` found it so.
    """

    step: int
    committed: float
    size_bytes: int = 0
    damaged: bool = False


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``keep_last``: the good steps committed last. ``keep_every`` K: also steps that K divides (0: none).

    ``keep_hours``: of all those, only the ones committed within so many hours (None: of any age). ``keep_gb``: of
    those, as many as fit into so many gigabytes of 10^9 bytes (None: all); the oldest go first. Damaged steps are not
    counted as kept, and go before good ones where room is short. ``keep_step``: one that stays whatever the others say,
    such as the newest that replicas were compared after (-1: none). Raises UsageError for numbers that make no sense.
    """

    keep_last: int = 3
    keep_every: int = 0
    keep_hours: float | None = None
    keep_gb: float | None = None
    keep_step: int = -1

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 1), ("keep_every", 0)):
            given = getattr(self, name)
            if not _is_whole(given) or given < least:
                raise UsageError(f"{name} is {given!r}, it must be a whole number, {least} or more")
            msgspec.structs.force_setattr(self, name, operator.index(given))
        for name in ("keep_hours", "keep_gb"):
            given = getattr(self, name)
            if given is not None and not is_number(given, above=0):
                raise UsageError(f"{name} is {given!r}, it must be a number above 0, or None")
            msgspec.structs.force_setattr(self, name, None if given is None else float(given))

    @property
    def needs_verified_writes(self) -> bool:
        """Return whether a snapshot must be verified once more on its way to disk.

        Its checksums are computed while it is copied and are checked by every restore. Memory that goes bad in between
        would be found too late, if this save's commit has removed the step before.
        """
        return self.keep_last == 1

    def expendable(self, steps: Sequence[CommittedStep], now: float) -> list[int]:
        """Return the steps to remove, of ``steps`` in the order of their commits.

        The step committed last always stays, and so do the last one that is not damaged, and ``keep_step``.
        """
        stay = {*steps[-1:], *[step for step in steps if not step.damaged][-1:]}
        stay |= {step for step in steps if step.step == self.keep_step}
        gone = set()
        good_ones_later = 0
        for step in reversed(steps):
            is_last = good_ones_later < self.keep_last
            is_milestone = self.keep_every > 0 and step.step % self.keep_every == 0
            is_old = self.keep_hours is not None and now - step.committed > 3600 * self.keep_hours
            if step not in stay and (is_old or not (is_last or is_milestone)):
                gone.add(step)
            good_ones_later += not step.damaged
        if self.keep_gb is not None:
            kept = [step for step in steps if step not in gone]
            size = sum(step.size_bytes for step in kept)
            for step in sorted(kept, key=lambda step: not step.damaged):
                if size > self.keep_gb * _GB and step not in stay:
                    gone.add(step)
                    size -= step.size_bytes
        return [step.step for step in steps if step in gone]
