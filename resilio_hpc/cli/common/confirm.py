"""A question before something is done that hurts."""

from __future__ import annotations

import sys

from resilio_hpc.core.errors import UsageError


def confirmed(question: str, yes: bool) -> bool:
    """Return whether it may be done. ``yes``: it was said before. Raises UsageError where no terminal can answer."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to answer: give --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # stdout may be for a program
    try:
        answer = input()
    except EOFError:
        answer = ""
    return answer.strip().lower() in ("y", "yes")
