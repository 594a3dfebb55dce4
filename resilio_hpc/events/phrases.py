"""Parts of sentences: lists of names, counts, durations, where a step was restored from. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 4


def names(all_names: Sequence[str]) -> str:
    """Return ``n1, n2``; of many the first few, and how many more."""
    shown = ", ".join(all_names[:MAX_NAMES])
    more = len(all_names) - MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "no node"


def plural(count: int | None, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{'?' if count is None else count} {noun}{ending}"


def seconds(value: float | None) -> str:
    """Return a duration with two or three significant digits.

    ``0.07 s``, ``12.5 s``, ``3 min 20 s``, ``2 h 05 min``.
    """
    if value is None:
        return "? s"
    if value < 10:
        return f"{value:.2f} s"
    if value < 100:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value) // 60} min {int(value) % 60:02d} s"
    return f"{int(value) // 3600} h {int(value) % 3600 // 60:02d} min"


def amount(value: float) -> str:
    """Return a number of things: ``131,072``, ``0.25``."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e15 else f"{value:.4g}"


def restored(source: str, step: int | None) -> str:
    """Return where ranks go on: ``step 40 from memory``, ``step 40 from the committed checkpoint``."""
    places = {
        "memory": "memory", "local": "the nodes' own disks", "peer": "each other's disks",
        "committed": "the committed checkpoint",
    }  # fmt: skip
    place = places.get(source, source)
    return f"step {step} from {place}" if place else f"step {step}"


def read_by(by: str) -> str:
    """Return how a snapshot came, where it was not by TCP: ``by`` of ``copied`` and ``fetched``."""
    return f", read by {by}" if by not in ("", "tcp") else ""
