"""Search of many patterns in one line: only those are tried whose literal text is in it.

An alternative of a pattern (between two ``|`` on its outermost level) contains a literal, such as ``out of memory``. It
is filed under four of the literal's letters. The letters of a line, four by four, give the few alternatives to try.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

_LETTERS = 4
# the words of a regular expression: a set, an escape, a repetition, a parenthesis, …, or any other letter as it stands
_WORD = re.compile(
    r"""(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\]) | (?P<escaped>\\[^\w\s]|\\\ ) | (?P<class>\\.)
      | (?P<repeat>[?*+]|\{[\d,]+\}) | (?P<open>\() | (?P<close>\)) | (?P<or>\|) | (?P<other>[.^$]) | (?P<plain>.)""",
    re.VERBOSE,
)


def alternatives(text: str) -> list[str]:
    """Return the parts of a regular expression between the ``|`` of its outermost level."""
    parts, start, depth = [], 0, 0
    for word in _WORD.finditer(text):
        depth += {"open": 1, "close": -1}.get(word.lastgroup or "", 0)
        if word.lastgroup == "or" and depth == 0:
            parts.append(text[start : word.start()])
            start = word.end()
    return [*parts, text[start:]]


def literals_of(alternative: str) -> list[str]:
    """Return texts, in small letters, of which every match of an alternative contains one; [] where there are none.

    That is the longest literal of its outermost level or, where that is short, those of one group's branches.
    """
    runs, groups, depth, opened = [""], list[str](), 0, 0
    words = list(_WORD.finditer(alternative))
    for word, following in zip(words, [*words[1:], None], strict=True):
        kind = word.lastgroup
        if depth == 0 and kind in ("plain", "escaped"):
            runs[-1] += word.group()[-1]
            continue
        if kind == "open":
            depth, opened = depth + 1, word.end() if depth == 0 else opened
        elif kind == "close":
            depth -= 1
            skipped = following is not None and following.lastgroup == "repeat" and following.group() != "+"
            if depth == 0 and not skipped and alternative[opened : opened + 1] != "?":
                groups.append(alternative[opened : word.start()])
        elif depth == 0 and kind == "repeat" and word.group() != "+":
            runs[-1] = runs[-1][:-1]  # it may be there no times
        runs.append("")
    if len(longest := max(runs, key=len).lower()) >= _LETTERS:
        return [longest]
    of_groups = [[literals_of(branch) for branch in alternatives(group)] for group in groups]
    return next(([text for branch in branches for text in branch] for branches in of_groups if all(branches)), [])


class PatternIndex:
    """Regular expressions, found in lines whatever their case."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._filed: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._always: list[tuple[int, str]] = []
        self._compiled: dict[str, re.Pattern[str]] = {}  # few are ever tried, and each takes a third of a millisecond
        for number, text in enumerate(texts):
            for alternative in alternatives(text):
                entry = (number, alternative)
                keys = {self._least_used(literal) for literal in literals_of(alternative)}
                for key in keys:
                    self._filed[key].append(entry)
                if not keys:
                    self._always.append(entry)
        self._keys = frozenset(self._filed)

    def _least_used(self, literal: str) -> str:
        keys = [literal[at : at + _LETTERS] for at in range(len(literal) - _LETTERS + 1)]
        return min(keys, key=lambda key: (len(self._filed.get(key, ())), key))

    def first(self, line: str) -> int | None:
        """Return the number of the first of the texts that is found in a line; None where none is."""
        small = line.lower()
        found = self._keys.intersection([small[at : at + _LETTERS] for at in range(len(small) - _LETTERS + 1)])
        entries = [entry for key in found for entry in self._filed[key]] + self._always
        return min((number for number, alternative in entries if self._regex(alternative).search(line)), default=None)

    def _regex(self, alternative: str) -> re.Pattern[str]:
        if alternative not in self._compiled:
            self._compiled[alternative] = re.compile(alternative, re.IGNORECASE)
        return self._compiled[alternative]
