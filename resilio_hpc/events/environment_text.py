"""Words for what nodes are like, and for what communication libraries wrote there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.phrases import names, plural


def _differs(f: Fields) -> str:
    nodes, found = [str(node) for node in f.data.get("nodes") or []], f.data.get("facts")
    others = max(0, (f.whole("of") or 0) - (f.whole("count") or 0))
    pairs = found.items() if isinstance(found, dict) else ()
    facts = [
        f"{name} {pair[0]} (there: {pair[1]})" for name, pair in pairs if isinstance(pair, list) and len(pair) == 2
    ]
    more = f" and {(f.whole('count') or 0) - len(nodes)} more" if (f.whole("count") or 0) > len(nodes) else ""
    verb = "differs" if len(nodes) == 1 else "differ"
    return f"{names(nodes)}{more} {verb} from {plural(others, 'other node')}: {', '.join(facts)}"


ENVIRONMENT_EVENTS: Mapping[str, Callable[[Fields], str]] = {
    "node_unfit": lambda f: f"{f.text('node', '?')} takes no part: {f.text('reason')}",
    "environment_short": lambda f: f"{f.text('node', '?')}: {f.text('reason')}",
    "environment_differs": _differs,
    "traces": lambda f: (
        f"what the communication libraries of round {f.whole('round')} wrote on {f.text('node', '?')}: "
        f"{f.text('directory')}"
    ),
    "traces_lost": lambda f: (
        f"what the communication libraries of round {f.whole('round')} wrote on {f.text('node', '?')} could not be "
        f"kept: {f.text('error')}"
    ),
}
