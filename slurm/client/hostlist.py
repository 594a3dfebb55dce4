"""Slurm's host list notation: ``n[1-3,07],login`` and ``8(x2),4``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from resilio_hpc.core.errors import UsageError

MAX_NODES = 100_000
NOTHING = ("", "(null)", "None", "None assigned", "N/A", "n/a")
"""How Slurm's commands say that there are no nodes."""

_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PART = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")


def expand(text: str) -> list[str]:
    """Return ``"n[1-2],gpu07"`` → ``["n1", "n2", "gpu07"]``. Raises UsageError for other notation.

    ``(null)`` and other words of NOTHING are refused too: see ``told``.
    """
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
        if not _NAME.fullmatch(part):
            raise UsageError(f"not a Slurm host list: {whole!r}")
        return [part]
    inside, closed, tail = rest.partition("]")
    if not closed:
        raise UsageError(f"not a Slurm host list: {whole!r}")
    names: list[str] = []
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UsageError(f"not a Slurm host list: {whole!r}")
        numbers = range(int(found[1]), int(found[2] or found[1]) + 1)
        if len(numbers) > MAX_NODES:
            raise UsageError(f"host list {whole!r} names more than {MAX_NODES} nodes")
        for number in numbers:
            names += _expand_brackets(f"{head}{number:0{len(found[1])}d}{tail}", whole)
    return names


def told(text: str) -> list[str]:
    """Return the nodes in an answer of Slurm's; none where it says so. Raises UsageError."""
    return [] if text.strip() in NOTHING else expand(text)


def expand_counts(text: str) -> list[int]:
    """Return ``"8(x2),4"`` → ``[8, 8, 4]`` (SLURM_JOB_CPUS_PER_NODE and similar). Raises UsageError."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item.strip())
        if match is None:
            raise UsageError(f"not a Slurm count list: {text!r}")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def compress(names: Sequence[str]) -> str:
    """Return ``["n1", "n2", "gpu07"]`` → ``"n[1-2],gpu07"``; ``expand`` gives the names back in the same order."""
    parts: list[str] = []
    index = 0
    while index < len(names):
        end = _run_end(names, index)
        match = _NUMBERED.fullmatch(names[index])
        if match is not None and end > index + 1:
            last = _NUMBERED.fullmatch(names[end - 1])
            assert last is not None
            parts.append(f"{match[1]}[{match[2]}-{last[2]}]")
        else:
            parts.append(names[index])
        index = end
    return ",".join(parts)


def _run_end(names: Sequence[str], start: int) -> int:
    """Return where the run of names that count up by one from ``start`` ends."""
    match = _NUMBERED.fullmatch(names[start])
    if match is None:
        return start + 1
    head, width, number = match[1], len(match[2]), int(match[2])
    end = start + 1
    while end < len(names) and names[end] == f"{head}{number + end - start:0{width}d}":
        end += 1
    return end
