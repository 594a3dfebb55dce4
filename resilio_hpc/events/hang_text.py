"""The words for events of runs that stand still, and of the limits that tell so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.phrases import names, plural, seconds


def _stalled(f: Fields) -> str:
    what, since = ("step", f" since step {f.whole('step')}") if (f.whole("step") or 0) >= 0 else ("call", "")
    fewest = f"; fewest steps: {names(f.texts('nodes'))}" if f.texts("nodes") else ""
    return f"no {what} for {seconds(f.number('silent_s'))}{since}{_expected_within(f)}{fewest}"


def _goes_on(f: Fields) -> str:
    what = f"step {f.whole('step')} is done" if (f.whole("step") or 0) >= 0 else "there are calls again"
    return f"{what}, after {seconds(f.number('waited_s'))} without one"


def _expected_within(f: Fields) -> str:
    """Return the limit in words, or "" where it is not over: the run is known to stand still."""
    limit_s = f.number("limit_s")
    return f" (expected within {seconds(limit_s)})" if (f.number("silent_s") or 0.0) >= (limit_s or 0.0) else ""


def _hang(f: Fields) -> str:
    """Return why the ranks do not go on, and what follows."""
    evidence = f.text("evidence")
    if f.data.get("moves") is True:
        return f"no step, but {evidence}: not a hang"
    where = "".join(f"; {_ranks_at(group)}" for group in f.each("places")[:2])
    if f.data.get("acted") is True:
        return f"hang: {evidence}; the ranks are restarted{where}"
    limit = f.number("waits_until_s")
    follows = f"; the ranks are restarted if it lasts {seconds(limit)}" if limit else "; nothing is done"
    seen = "no hang is seen" if f.text("kind") == "none" else "no progress"
    return f"{seen}: {evidence}{follows}{where}"


def _ranks_at(group: Fields) -> str:
    """Return ``rank 3 at data.py:12`` or ``5 ranks at train.py:88``."""
    count, ranks = group.whole("count"), group.data.get("ranks")
    one = f"rank {ranks[0]}" if count == 1 and isinstance(ranks, list | tuple) and ranks else plural(count, "rank")
    return f"{one} at {group.text('place')}"


def _limits_set(f: Fields) -> str:
    limits = f.inner("limits")
    values = {name.removeprefix("section:"): limits.number(name) for name in limits.data}
    set_to = [f"{name} {'never' if value == 0 else seconds(value)}" for name, value in values.items()]
    again = [name.removeprefix("section:") for name in f.texts("again")]
    learned = f"; learned from the start: {names(again)}" if again else ""
    return f"limits set by {f.text('by') or 'the user'}: {names(set_to) if set_to else 'none'}{learned}"


HANG_EVENTS: Mapping[str, Callable[[Fields], str]] = {
    "stalled": _stalled,
    "hang": _hang,
    "goes_on": _goes_on,
    "limits_set": _limits_set,
}
