"""What one line of a log states, without its prefix and without what it only supposes."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
# what launchers and loggers write in front of a line, in any order and number: [rank3]: · [default0]: ·
# [1,2]<stderr>: · 12: · 2026-11-27 10:00:01,123 · (Worker pid=12) · ERROR · ERROR 11-27 · [launch.py:321:main]
_PREFIX = re.compile(
    r"""\s*(?:
        \[(?:rank|default|local_rank|node)?\s?(?:\d+|<\w+>)\]:?
      | \[\d+,\d+\]<std(?:out|err)>:
      | (?:\d{1,6}|<\w+>):(?=\s)
      | \(\w+\ pid=[^)]*\)
      | \[?\d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?
      | \[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?
      | \[?(?:ERROR|CRITICAL|WARNING|INFO)\]?(?:\ \d\d-\d\d)?\s?[:|-]?(?=\s)
      | \[?\w+\.py:\d+(?::\w+)?\]:?(?=\s)
      | <(?:T|RANK)>
      | \[<T>\]
    )\s*""",
    re.VERBOSE,
)
_SUPPOSED = re.compile(
    # c10d says of a peer that is gone "the store might have been closed", "connection was likely closed"
    r"\b(?:may|might|could|can) (?:have been|be|also|indicate|mean)\b(?! closed)"
    r"|\b(?:usually|possibly|perhaps|probably|likely|potential(?:ly)?)\b(?! closed)"
    r"|\b(?:check|make sure|ensure|verify) (?:that|whether|if)\b"
    r"|\bif (?:you|this|the)\b",
    re.IGNORECASE,
)
_ENDS_SENTENCE = re.compile(r"[.;:!?]\s|\s[-–(]")
MOST_CHARACTERS = 1000
"""Of a longer line the middle is left out, so that no line can hold up a search."""


def stated(line: str) -> str:
    """Return what a line states: no escape sequences, no prefix of a launcher, nothing that it calls possible."""
    line = line.rstrip().rpartition("\r")[2]  # a progress bar writes over itself
    if len(line) > MOST_CHARACTERS:
        line = line[: MOST_CHARACTERS * 3 // 4] + " … " + line[-MOST_CHARACTERS // 4 :]
    text = _ESCAPE.sub("", line)
    while found := _PREFIX.match(text):
        text = text[found.end() :]
    if supposed := _SUPPOSED.search(text):
        ends = [end.end() for end in _ENDS_SENTENCE.finditer(text, 0, supposed.start())]
        text = text[: ends[-1] if ends else 0]
    return text.rstrip()
