"""Cases as JSON lines: ``id`` and ``lines[].text`` come in, each case's cause goes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.diagnose.causes.judge import judge_lines

MOST_EVIDENCE = 200


class _CaseLine(msgspec.Struct):
    text: str


class _Case(msgspec.Struct):
    id: str
    lines: list[_CaseLine]


class JudgedCase(msgspec.Struct, frozen=True):
    """A line of the answer."""

    id: str
    label: str
    root: int | None
    confidence: float
    evidence: str


def judged(lines: Iterable[bytes], name: str) -> Iterator[JudgedCase]:
    """Yield the answer to each case. Raises UsageError, with the number of the line, for one that is no case."""
    decoder = msgspec.json.Decoder(_Case)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}, line {number}: {error}") from None
        cause = judge_lines([one.text for one in case.lines])
        root = None if cause.root is None else cause.root.index
        said = cause.evidence if cause.root is None else f"{cause.evidence}: {cause.root.statement[:MOST_EVIDENCE]}"
        yield JudgedCase(case.id, cause.label.value, root, cause.confidence, said)
