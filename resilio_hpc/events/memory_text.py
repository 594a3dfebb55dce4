"""What is said of memory that is nearly full: rows of ``event_text``'s table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.phrases import names, plural, seconds

_LEVELS = {1: "warning", 2: "critical"}


def memory_words(f: Fields) -> str:
    """Return how full a memory is, and what follows: ``job memory 96 % of 64 GiB, full in about 3 min 20 s``."""
    used, limit = f.number("used_bytes") or 0.0, f.number("limit_bytes") or 0.0
    share = f"{used / limit:.0%}".replace("%", " %") if limit > 0 else "?"
    kind, _, number = f.text("subject", "?").partition(" ")
    what = {
        "host": "memory", "job": "the job's memory limit", "gpu": f"memory of GPU {number}",
        "rank": f"address space of rank {number} (ulimit -v)",
    }.get(kind, kind)  # fmt: skip
    text = f"{what}: {share} of {size(limit)} in use"
    if f.has("full_in_s"):
        text += f", full in about {seconds(f.number('full_in_s'))} at this rate"
    if f.text("largest") and kind in ("host", "job"):
        text += f"; {f.text('largest')} has most ({size(f.number('largest_bytes') or 0.0)})"
    return text


def size(number: float) -> str:
    """Return ``64 GiB``, ``512 MiB``."""
    return f"{number / 2**30:.3g} GiB" if number >= 2**30 else f"{number / 2**20:.3g} MiB"


def _counters(f: Fields) -> str:
    grown = f.inner("grown").data
    shown = [f"{name} +{value}" for name, value in grown.items()]
    where = f"{f.text('when', '?')} round {f.whole('round')} on {f.text('node', '?')}"
    if f.text("when") == "before":
        return f"counters of errors {where}: {plural(len(f.inner('values').data), 'counter')} not 0"
    return f"counters of errors {where}: {names(shown) if shown else 'none has grown'}"


def _alert(f: Fields) -> str:
    more = (f.whole("count") or 1) - 1
    others = f"; and on {plural(more, 'more node')}" if more > 0 else ""
    return f"memory {_LEVELS.get(f.whole('level') or 0, 'warning')} on {f.text('node', '?')}: {f.text('text')}{others}"


_ROOM = {
    "memory": "have room for two snapshots in memory again",
    "disk": "have no room for two snapshots in memory: one or both are files on the node's disk",
    "one": "have room for one snapshot alone: each is written over the one before",
    "reduced": "have room for what no other rank of the node has, and leave the rest out",
    "none": "have no room for a new snapshot: it is not saved",
}


def _snapshot_room(f: Fields) -> str:
    what = _ROOM.get(f.text("room"), f.text("room", "?"))
    why = f" ({f.text('why')})" if f.text("why") else ""
    return f"step {f.whole('step')}: saves of rank {f.whole('rank')} on {f.text('node', '?')} {what}{why}"


MEMORY_EVENTS: Mapping[str, Callable[[Fields], str]] = {
    "memory_warning": lambda f: (
        f"memory {_LEVELS.get(f.whole('level') or 0, 'warning')} on {f.text('node', '?')}: {memory_words(f)}"
    ),
    "memory_eased": lambda f: f"memory on {f.text('node', '?')} is as usual again: {memory_words(f)}",
    "memory_alert": _alert,
    "counters": _counters,
    "snapshot_room": _snapshot_room,
    "metrics_endpoint": lambda f: f"metrics of {f.text('node', '?')}: {f.text('url')}",
    "metrics_unclear": lambda f: f"metrics of {f.text('node', '?')}: {f.text('reason')}",
    "sampler_died": lambda f: (
        f"the process that samples {f.text('node', '?')} {f.text('why', 'died')}"
        f"{'' if f.data.get('again', True) else ': no more samples of this node'}"
    ),
}
