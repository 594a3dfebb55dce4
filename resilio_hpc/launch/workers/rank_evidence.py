"""What a node knows of a rank's end beside its exit and its error file: its calls, its log, the kernel's word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilio_hpc.core import regular_file
from resilio_hpc.diagnose.causes.judge import judge_lines
from resilio_hpc.diagnose.causes.known_faults import fault_in
from resilio_hpc.diagnose.causes.pattern_table import FaultOf
from resilio_hpc.diagnose.hangs.rank_sight import GroupSight
from resilio_hpc.launch.protocol.message_parts import MOST_LOG

MOST_BYTES = 16 << 10
MOST_LINES = 100


class RankEvidence(msgspec.Struct, frozen=True):
    """Evidence of one end.

    ``log``: the line of its log that tells most. ``groups``: its communicators, and how many calls it had entered.
    """

    log: str = ""
    groups: tuple[GroupSight, ...] = ()


NO_EVIDENCE = RankEvidence()


def telling_line(lines: Sequence[str]) -> str:
    """Return the line that says why a rank ended: of a peer's end, else the likeliest cause; "" without any. Pure."""
    text = "\n".join(lines)
    echo = fault_in(text, FaultOf.PEER)
    if echo is not None:
        return echo[1][:MOST_LOG]
    cause = judge_lines(lines)
    return cause.root.statement[:MOST_LOG] if cause.root is not None and not cause.overcome else ""


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log on this node; [] where it cannot be read."""
    try:
        with open(regular_file.open_file(log), "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_BYTES))
            return file.read(MOST_BYTES).decode(errors="replace").splitlines()[-MOST_LINES:]
    except OSError:
        return []
