"""Which line of some logs names the cause of a failure, and whose fault it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from resilio_hpc.diagnose.causes.log_line import stated
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, FailurePattern, LineRole, find, guess

_GUESSED_LINES = 50  # guesses look at the end of each stream
_AS_SURE = 0.1  # candidates this close to the surest are equals, and the earliest of them counts
# a loop at work: "step 120 … loss 2.1", "iteration 42780/ 115311 | …", "Epoch 3: 46%|####6 | 31/67 [29:02<35:12"
_PROGRESS = re.compile(
    r"\b(?:iteration|iter|step|global_step|epoch)\b\W{0,3}\d+.*\b(?:loss|lr|elapsed|time|tokens|grad|throughput|it/s)"
    r"|\d+%\|.*\|\s*\d+/\d+\s*\[",
    re.IGNORECASE,
)


class LogStream(msgspec.Struct, frozen=True):
    """Lines of one writer, in order. ``progress``: indices of lines that say that the work goes on."""

    name: str
    lines: Sequence[str]
    first: int = 1
    progress: frozenset[int] = frozenset()

    def place(self, index: int) -> str:
        """Return ``FILE:LINE`` of a line."""
        return f"{self.name}:{self.first + index}"


class Sighting(msgspec.Struct, frozen=True):
    """A line that is known. ``stream`` and ``index``: where it is."""

    stream: int
    index: int
    statement: str
    pattern: FailurePattern


class LikelyCause(msgspec.Struct, frozen=True):
    """What is to blame. ``root``: the line that names it; ``confidence``: 0 to 1, that the class is right.

    ``overcome``: progress followed that line. ``others``: how often other patterns were seen behind the last progress.
    """

    label: CauseClass
    confidence: float
    evidence: str
    root: Sighting | None = None
    overcome: bool = False
    others: dict[str, int] = {}


def judge(streams: Sequence[LogStream]) -> LikelyCause:
    """Return the cause that logs name.

    The earliest line with the role "root" counts, of those that are about as sure as the surest; without any, the
    surest "either" line. Echoes never count. A line before its stream's last sign of progress was overcome, and counts
    only where nothing comes after it. Where only echoes are left, or nothing, a line before them may give a guess.
    """
    found: list[Sighting] = []
    overcome: list[Sighting] = []
    for number, stream in enumerate(streams):
        before, after = _read(number, stream)
        overcome += before
        found += after
    if _may_be_causes(found):
        return _cause(found)
    if _may_be_causes(overcome):
        before_it = _cause(overcome)
        return msgspec.structs.replace(before_it, confidence=round(before_it.confidence / 2, 2), overcome=True)
    if guessed := _guess(streams, found):
        hint = guessed.pattern
        return LikelyCause(hint.cause, hint.sure, hint.says, guessed, others=_counts(found))
    if found or overcome:
        return LikelyCause(
            CauseClass.UNKNOWN, 0.2, "only lines that follow from a failure", others=_counts(found or overcome)
        )
    return LikelyCause(CauseClass.UNKNOWN, 0.1, "no line that is known")


def judge_lines(lines: Sequence[str]) -> LikelyCause:
    """Return the cause that lines name, in the order in which they were written."""
    return judge([LogStream("", lines)])


def _read(number: int, stream: LogStream) -> tuple[list[Sighting], list[Sighting]]:
    """Return what is known of a stream, before and after its last sign of progress."""
    before: list[Sighting] = []
    after: list[Sighting] = []
    for index, line in enumerate(stream.lines):
        statement = stated(line)
        pattern = find(statement)
        if index in stream.progress or (pattern is None and _PROGRESS.search(statement)):
            before += after
            after = []
        elif pattern is not None:
            after.append(Sighting(number, index, statement, pattern))
    return before, after


def _guess(streams: Sequence[LogStream], echoes: Sequence[Sighting]) -> Sighting | None:
    """Return the first line, behind the last progress and before any echo, that tells of a failure by its words."""
    ends = {one.stream: one.index for one in reversed(echoes)}
    for number, stream in enumerate(streams):
        first: Sighting | None = None
        for index in range(max(0, len(stream.lines) - _GUESSED_LINES), ends.get(number, len(stream.lines))):
            statement = stated(stream.lines[index])
            if index in stream.progress or _PROGRESS.search(statement):
                first = None
            elif first is None and find(statement) is None and (hint := guess(statement)):
                first = Sighting(number, index, statement, hint)
        if first:
            return first
    return None


def _may_be_causes(sightings: Sequence[Sighting]) -> bool:
    return any(one.pattern.role is not LineRole.ECHO for one in sightings)


def _cause(sightings: Sequence[Sighting]) -> LikelyCause:
    roots = [one for one in sightings if one.pattern.role is LineRole.ROOT]
    candidates = roots or [one for one in sightings if one.pattern.role is LineRole.EITHER]
    surest = max(one.pattern.sure for one in candidates)
    root = next(one for one in candidates if one.pattern.sure >= surest - _AS_SURE)
    others = _counts([one for one in sightings if one.pattern is not root.pattern])
    return LikelyCause(root.pattern.cause, root.pattern.sure, root.pattern.says, root, others=others)


def _counts(sightings: Sequence[Sighting]) -> dict[str, int]:
    return dict(Counter(one.pattern.says for one in sightings).most_common())
