"""Slurm's host list notation: ``n[1-3,07],login`` and ``8(x2),4``. Pure."""

from __future__ import annotations

import re

from resilio_hpc.core.errors import UsageError

MAX_NODES = 100_000
_PART = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")


def expand(text: str) -> list[str]:
    """``"n[1-2],gpu07"`` → ``["n1", "n2", "gpu07"]``. Raises UsageError for what is not a host list."""
    names: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _PART.match(text, position)
        if match is None or match.end() == position or text[match.end() :][:1] not in ("", ","):
            raise UsageError(f"not a Slurm host list: {text!r}")
        names += _expand_brackets(match.group(), text)
        if len(names) > MAX_NODES:
            raise UsageError(f"host list {text!r} names more than {MAX_NODES} nodes")
        position = match.end() + 1
    return names


def _expand_brackets(part: str, whole: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, closed, tail = rest.partition("]")
    if not closed:
        raise UsageError(f"not a Slurm host list: {whole!r}")
    names: list[str] = []
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"not a Slurm host list: {whole!r}")
        numbers = range(int(first), int(last or first) + 1)
        if len(numbers) > MAX_NODES:
            raise UsageError(f"host list {whole!r} names more than {MAX_NODES} nodes")
        for number in numbers:
            names += _expand_brackets(f"{head}{number:0{len(first)}d}{tail}", whole)
    return names


def expand_counts(text: str) -> list[int]:
    """``"8(x2),4"`` → ``[8, 8, 4]`` (SLURM_JOB_CPUS_PER_NODE and the like). Raises UsageError."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UsageError(f"not a Slurm count list: {text!r}")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts
