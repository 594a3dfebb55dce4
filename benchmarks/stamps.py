"""The lines that each rank of examples/train_tiny.py leaves behind, and what they say about a recovery."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stamp:
    """An event of a rank that is over: a phase of PHASES, or the number of a step."""

    event: str
    time_s: float

    @property
    def is_step(self) -> bool:
        return self.event.isdigit()


FIRST = "start"
PHASES = {
    "stop and start": FIRST,
    "import": "imported",
    "join": "init",
    "build": "built",
    "restore": "restored",
}
"""Phase → the event that ends it, in order. The first step comes after them."""


def parse(text: str) -> list[Stamp]:
    """Stamps of one rank's file, `event unix_time round` a line. A last line that is not whole yet is left out."""
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Stamp(row[0], float(row[1])) for row in rows]


def path_of(directory: Path, rank: int) -> Path:
    return directory / f"steps-rank{rank}"


def read(directory: Path, ranks: int) -> list[list[Stamp]]:
    """Stamps by rank; an empty list for a rank that has not begun."""
    paths = [path_of(directory, rank) for rank in range(ranks)]
    return [parse(path.read_text()) if path.exists() else [] for path in paths]


def last_life(stamps: Sequence[Stamp]) -> Sequence[Stamp]:
    """Return what the rank's newest process did. A restart may fail and be restarted: only the last one counts."""
    starts = [index for index, stamp in enumerate(stamps) if stamp.event == FIRST]
    return stamps[starts[-1] :] if starts else ()


def steps_done(stamps: Sequence[Stamp]) -> int:
    """Return steps that the rank's newest process has completed."""
    return sum(stamp.is_step for stamp in last_life(stamps))


def recovery(stamps_by_rank: Sequence[Sequence[Stamp]], killed_at_s: float) -> Mapping[str, float] | None:
    """Time of each phase from the kill to the first step that every rank completed; None while one has not.

    A phase ends when the last rank has ended it. The sum of all phases is the recovery time.
    """
    lives = [last_life(stamps) for stamps in stamps_by_rank]
    if not all(life and life[0].time_s > killed_at_s and any(stamp.is_step for stamp in life) for life in lives):
        return None
    ends_s = {phase: max(ended_s(life, event) for life in lives) for phase, event in PHASES.items()}
    ends_s["first step"] = max(next(stamp.time_s for stamp in life if stamp.is_step) for life in lives)
    begins_s = [killed_at_s, *ends_s.values()]
    return {phase: end_s - begun_s for (phase, end_s), begun_s in zip(ends_s.items(), begins_s, strict=False)}


def ended_s(life: Sequence[Stamp], event: str) -> float:
    return next(stamp.time_s for stamp in life if stamp.event == event)
