"""Generic resources in Slurm's notation: ``gpu:h100:8(S:0-3),shard:32``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_NOTHING = {"", "(null)", "N/A", "none"}
_COUNT = re.compile(r"(\d{1,18})([KMGTP]?)", re.IGNORECASE)
_SCALE = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True)
class Gres:
    """One kind of resource. ``count``: None where it is unreadable.

    ``type``: a GPU's model or a MIG profile's name (``a100_1g.5gb``); ``sockets`` and ``indices``: Slurm's own lists
    (``"0-3"``), "" when not told; ``detail``: other text in brackets, such as a shard's ``1/4,0/4``.
    """

    name: str
    type: str = ""
    count: int | None = None
    sockets: str = ""
    indices: str = ""
    detail: str = ""


@lru_cache(maxsize=4096)  # thousands of nodes have the same text
def parse_gres(text: str) -> tuple[Gres, ...]:
    """Return all kinds of a node's ``gres`` or ``gres_used``, or of a job's ``tres_per_node``; never raises."""
    return () if text.strip() in _NOTHING else tuple(_one(item) for item in _items(text.strip()))


def _items(text: str) -> list[str]:
    """Split at commas that are outside brackets."""
    items, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "," and depth == 0:
            items.append(text[start:place])
            start = place + 1
        depth = max(0, depth + (letter == "(") - (letter == ")"))
    return [item.strip() for item in [*items, text[start:]] if item.strip()]


def _one(item: str) -> Gres:
    head, bracket, inside = item.partition("(")
    for prefix in ("gres:", "gres/"):
        head = head.removeprefix(prefix)
    words = [word for word in head.split(":") if word != "no_consume"]
    count = _count(words[-1]) if len(words) > 1 else None
    kind = ":".join(words[1:-1] if count is not None else words[1:])
    inside = inside.rstrip(")") if bracket else ""
    label, _, rest = inside.partition(":")
    return Gres(
        name=words[0] if words else item,
        type=kind,
        count=count,
        sockets=rest if label == "S" else "",
        indices=rest if label == "IDX" and rest != "N/A" else "",
        detail=inside if label not in ("S", "IDX") else "",
    )


def _count(word: str) -> int | None:
    found = _COUNT.fullmatch(word)
    return int(found[1]) * 1024 ** _SCALE[found[2].upper()] if found else None
