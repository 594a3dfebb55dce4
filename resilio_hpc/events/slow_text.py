"""Ledger entries about slow ranks as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.phrases import names, seconds

CAUSES = {
    "cpu_throttled": "its processor quota is used up",
    "noisy_neighbour": "other processes take its processors",
    "garbage_collection": "Python's garbage collector",
    "data_loader": "its data loader",
    "storage": "slow storage",
    "link": "a slow network link",
    "gpu_throttled": "its GPU does not run at full speed",
    "unknown": "cause unknown",
}


def slow_subject(f: Fields) -> str:
    """Return which ranks are slow, and where they are."""
    ranks = [str(rank) for rank in f.data.get("ranks") or [] if isinstance(rank, int)]
    if not ranks:
        return "all ranks"
    where = f" on {names(f.texts('nodes'))}" if f.texts("nodes") else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {names(ranks)}{where}"


def slow_words(f: Fields) -> str:
    """Return what is slow, how much, and why."""
    ranks = f.data.get("ranks") or []
    plural = not isinstance(ranks, list) or len(ranks) != 1
    ratio = f.number("ratio") or 0.0
    if f.text("cause") == "link" and f.data.get("nodes"):
        return f"the run is {ratio:.1f}x slower: the network link of {names(f.texts('nodes'))} ({f.text('evidence')})"
    than = " than its peers, from the start" if f.data.get("since_start") else ""
    cause = CAUSES.get(f.text("cause"), f.text("cause"))
    evidence = f" ({f.text('evidence')})" if f.text("evidence") else ""
    return f"{slow_subject(f)} {'are' if plural else 'is'} {ratio:.1f}x slower{than}: {cause}{evidence}"


def _slow(f: Fields) -> str:
    follows = "; a spare takes the place of its node after the next checkpoint" if f.data.get("acted") else ""
    return slow_words(f) + follows


def _slow_over(f: Fields) -> str:
    reason = f" ({f.text('reason')})" if f.text("reason") else ""
    return f"{slow_subject(f)}: as fast as before, after {seconds(f.number('lasted_s'))}{reason}"


SLOW_EVENTS: Mapping[str, Callable[[Fields], str]] = {"slow": _slow, "slow_over": _slow_over}
