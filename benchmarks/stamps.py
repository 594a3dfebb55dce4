"""The lines that each rank of the measured script leaves behind, and what they say about a recovery."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stamp:
    """An event of a rank that is over: `started`, `imported`, `joined`, `restored` or `step`."""

    time_s: float
    event: str
    step: int
    pid: int


PHASES = {
    "stop and start": "started",
    "import": "imported",
    "join": "joined",
    "build and load": "restored",
    "first step": "step",
}
"""Phase → the event that ends it, in order."""


def parse(text: str) -> list[Stamp]:
    """Stamps of one rank's file. A last line that is not whole yet is left out."""
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Stamp(float(row[0]), row[1], int(row[2]), int(row[3])) for row in rows]


def read(directory: Path, ranks: int) -> list[list[Stamp]]:
    """Stamps by rank; an empty list for a rank that has not begun."""
    paths = [directory / f"steps-rank{rank}" for rank in range(ranks)]
    return [parse(path.read_text()) if path.exists() else [] for path in paths]


def last_life(stamps: Sequence[Stamp]) -> Sequence[Stamp]:
    """What the rank's newest process did. A restart may fail and be restarted: only the last one counts."""
    starts = [index for index, stamp in enumerate(stamps) if stamp.event == "started"]
    return stamps[starts[-1] :] if starts else ()


def steps_done(stamps: Sequence[Stamp]) -> int:
    """Steps that the rank's newest process has completed."""
    return sum(stamp.event == "step" for stamp in last_life(stamps))


def recovery(stamps_by_rank: Sequence[Sequence[Stamp]], killed_at_s: float) -> Mapping[str, float] | None:
    """Time of each phase from the kill to the first step that every rank completed; None while one has not.

    A phase ends when the last rank has ended it. The sum of all phases is the recovery time.
    """
    lives = [last_life(stamps) for stamps in stamps_by_rank]
    if not all(life and life[0].time_s > killed_at_s for life in lives):
        return None
    phases, begun_s = {}, killed_at_s
    for phase, event in PHASES.items():
        ends = [next((stamp.time_s for stamp in life if stamp.event == event), None) for life in lives]
        known = [end for end in ends if end is not None]
        if len(known) < len(lives):
            return None
        phases[phase] = max(known) - begun_s
        begun_s = max(known)
    return phases
