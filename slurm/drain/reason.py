"""The reasons that this package writes on drained nodes, and how it recognises them. Pure.

``resilio:gpu.xid: Xid 79 on GPU 3 #1f09ab``: the prefix, the check, its evidence, and a tag over all of it. Several
checks may hold a node, joined by `` + ``. A person who edits such a reason owns it: the tag no longer fits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

PREFIX = "resilio:"
BY_HAND = "manual"  # the check of a drain that a person asked for
_CHECK = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TAGGED = re.compile(r"(.*) #([0-9a-f]{6})", re.DOTALL)
_JOINT = " + "
_DISOWNED = " (another order came at the same moment: look before you resume it)"
_EVIDENCE_LETTERS = 160
_ALL_LETTERS = 600


@dataclass(frozen=True)
class Finding:
    """A check that failed: its id (``gpu.xid``) and what it saw, in a line."""

    check: str
    evidence: str

    def __post_init__(self) -> None:
        if not _CHECK.fullmatch(self.check):
            raise UsageError(f"not a check's id: {printable(self.check)!r}; small letters, digits, dots: gpu.xid")


def write_reason(findings: Sequence[Finding]) -> str:
    """Return the reason's text.

    Long evidence is cut; characters that would confuse Slurm or the reader are replaced.
    """
    room = min(_EVIDENCE_LETTERS, _ALL_LETTERS // max(1, len(findings)))
    body = _JOINT.join(f"{PREFIX}{one.check}: {_evidence(one.evidence, room)}" for one in findings)
    return f"{body} #{_tag(body)}"


def disowned_reason(text: str) -> str:
    """Return a reason that this package does not recognise as its own: only a person ends such a drain."""
    return f"{PREFIX} {printable(text, _ALL_LETTERS)}{_DISOWNED}"


def is_disowned(reason: str) -> bool:
    """Return whether a drain began as this package's and was disowned."""
    return reason.startswith(PREFIX) and reason.endswith(_DISOWNED)


def held_for(reason: str) -> frozenset[str]:
    """Return the checks for which this package holds a node with this reason, disowned drains included."""
    ours = read_reason(f"{PREFIX}{reason.removeprefix(f'{PREFIX} ').removesuffix(_DISOWNED)}")
    return frozenset(one.check for one in (ours if is_disowned(reason) else read_reason(reason)) or ())


def read_reason(reason: str) -> tuple[Finding, ...] | None:
    """Return the findings; None when the reason is not this package's, or was edited."""
    tagged = _TAGGED.fullmatch(reason)
    if tagged is None or not reason.startswith(PREFIX) or _tag(tagged[1]) != tagged[2]:
        return None
    parts = tagged[1].removeprefix(PREFIX).split(_JOINT + PREFIX)
    pairs = [part.partition(": ") for part in parts]
    if not all(_CHECK.fullmatch(check) for check, _, _ in pairs):
        return None
    return tuple(Finding(check, evidence) for check, _, evidence in pairs)


def _evidence(text: str, room: int) -> str:
    plain = printable(" ".join(text.split()), room).replace(PREFIX, PREFIX.rstrip(":"))
    return plain.replace('"', "'").strip() or "no evidence given"


def _tag(body: str) -> str:
    return hashlib.sha256(body.encode(errors="replace")).hexdigest()[:6]
