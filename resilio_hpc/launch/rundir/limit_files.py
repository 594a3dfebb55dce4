"""The limits of a run in two small files of its directory: what its controller says, and what its user orders.

``limits.json`` is the controller's: all limits, and what they were learned from, for ``resilio timeouts`` and for the
next controller. ``links/limits.json`` is the user's order. It is replaced atomically, and the running controller sees
it with the next status that it writes. Both are optional; a damaged one counts as none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.watch.limit_table import Limit, LimitEntry, Name

MOST_BYTES = 256 * 1024
MOST_NAMES = 100
HANG, START, HEARTBEAT = "hang", "start", "heartbeat"
"""Limits that options set: until an uncertain hang is acted on, until ranks train, until a silent node is lost."""

Time = Annotated[float, msgspec.Meta(ge=0.0, le=2.5e11)]


class KeptLimits(msgspec.Struct, frozen=True):
    """All limits as the controller of ``epoch`` had them at ``time``. ``program``: for which they were learned.

    ``ordered``: the time of the newest order that was taken.
    """

    epoch: int = 0
    time: Time = 0.0
    ranks: int = 0
    program: str = ""
    ordered: Time = 0.0
    limits: Annotated[tuple[LimitEntry, ...], msgspec.Meta(max_length=2 * MOST_NAMES)] = ()
    v: int = 1


class LimitOrder(msgspec.Struct, frozen=True):
    """What the user has set, by name, in seconds. ``again``: limits to be learned from the start, each since when."""

    limits: Annotated[dict[Name, Limit], msgspec.Meta(max_length=MOST_NAMES)] = {}
    again: Annotated[dict[Name, Time], msgspec.Meta(max_length=2 * MOST_NAMES)] = {}
    by: str = ""
    time: Time = 0.0
    v: int = 1


Kind = TypeVar("Kind", KeptLimits, LimitOrder)


def order_file(run_path: Path) -> Path:
    """Return the path of the user's order."""
    return run_path / "links" / "limits.json"


def kept_file(run_path: Path) -> Path:
    """Return the path of the controller's file."""
    return run_path / "limits.json"


def read_kept(run_path: Path) -> KeptLimits:
    """Return what the last controller had. Raises Untrusted."""
    return _read(kept_file(run_path), KeptLimits)


def read_order(run_path: Path) -> LimitOrder:
    """Return the user's order. Raises Untrusted."""
    return _read(order_file(run_path), LimitOrder)


def write_order(run_path: Path, order: LimitOrder) -> None:
    """Replace the order, durably. Raises OSError."""
    write_atomic(order_file(run_path), msgspec.json.encode(order))


def write_kept(run_path: Path, kept: KeptLimits) -> None:
    """Replace the controller's file. Raises OSError."""
    write_atomic(kept_file(run_path), msgspec.json.encode(kept), durable=False)


def _read(path: Path, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(trusted_files.read(path, MOST_BYTES), type=kind)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return kind()


def parse(data: object, kind: type[Kind]) -> Kind:
    """Return what the I/O worker has read; nothing where it is damaged. Pure."""
    try:
        return msgspec.convert(data, kind)
    except ValueError:
        return kind()
