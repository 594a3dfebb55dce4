"""What is said of results that are wrong though nothing failed: rows of ``event_text``'s table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.phrases import names

_FOUND = {
    "transient": "it did not come again",
    "persistent": "it comes again there, and on no other device: its hardware is to blame",
    "deterministic": "it comes again on other devices, too: it may be right",
    "corrupt": "that rank had other values than its replicas, and has copied them from another one",
    "unresolved": "it comes again, and no other device could be asked",
}


def _differ(f: Fields) -> str:
    ranks = [str(rank) for rank in f.data.get("ranks") or [] if isinstance(rank, int)]
    where = f.text("tensor") or f"part {f.whole('part')} of {f.whole('parts')}"
    verified = f.whole("verified")
    before = f"; step {verified} was committed before" if verified is not None and verified >= 0 else ""
    if f.data.get("certain") is not True:
        return f"silent corruption: replicas differ at step {f.whole('step')} in {where} (ranks {names(ranks)}){before}"
    verb = "differs" if len(ranks) == 1 else "differ"
    on = f" on {names(f.texts('nodes'))}" if f.texts("nodes") else ""
    of = f.whole("replicas")
    who = f"rank{'s' if len(ranks) != 1 else ''} {names(ranks)}{on}"
    return f"silent corruption: {who} {verb} from the others, of {of}, at step {f.whole('step')} in {where}{before}"


def _judged(f: Fields) -> str:
    rank = f.whole("rank")
    on = f" on {f.text('node')}" if f.text("node") else ""
    who = f", rank {rank}{on}" if rank is not None else ""
    module = f"first in {f.text('module')}" if f.text("module") else ""
    samples = f"samples {f.text('samples')}" if f.text("samples") else ""
    details = [module, samples, f.text("device")]
    more = f" ({'; '.join(text for text in details if text)})" if any(details) else ""
    found = _FOUND.get(f.text("verdict"), f.text("verdict"))
    return f"suspect result of step {f.whole('step')}{who}: {f.text('signal') or '?'}{more}; {found}"


def _noise(f: Fields) -> str:
    own, peer = f.number("difference"), f.number("peer_difference")
    parts = (
        ["equal bit for bit" if own == 0 else f"differs by {own or 0.0:.1e} on the same device"]
        if own is not None
        else []
    )
    if peer is not None:
        parts.append("equal on another device" if peer == 0 else f"differs by {peer:.1e} on another device")
    return f"step {f.whole('step')} computed again: {', '.join(parts) or 'nothing measured'}"


CORRECTNESS_EVENTS: Mapping[str, Callable[[Fields], str]] = {
    "digests_differ": _differ,
    "step_verified": lambda f: f"step {f.whole('step')} is verified: replicas were equal from step {f.whole('by')} on",
    "result_judged": _judged,
    "noise_measured": _noise,
}
