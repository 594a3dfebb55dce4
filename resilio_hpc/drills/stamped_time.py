"""What became of a run's time, by the ranks' own stamps: no ledger and no report takes part in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.drills.stamps import Life


@dataclass(frozen=True)
class StampedTime:
    """Seconds of a run. A step counts when it was done for the last time.

    ``useful_s``: of the steps that count; ``repeated_s``: of steps that were done again later; ``wall_s``: from the
    beginning to the last step's end; ``startup_s``: until the first step began. ``steps``: how many count.
    """

    wall_s: float
    startup_s: float
    useful_s: float
    repeated_s: float
    steps: int
    repeated_steps: int

    @property
    def goodput(self) -> float:
        """Return the share of the time in which steps were made that count."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def lost_s(self) -> float:
        """Return what faults cost beyond steps that were done again: neither start nor step."""
        return max(0.0, self.wall_s - self.startup_s - self.useful_s - self.repeated_s)


def stamped_time(lives: Sequence[Life], began: float) -> StampedTime:
    """Return the account. ``lives`` in the order of their first steps; ``began``: of the run, Unix seconds."""
    took: dict[int, float] = {}
    repeated_s, repeated, ended, first = 0.0, 0, began, None
    for life in lives:
        if life.first_step is None:
            continue
        first = life.first_step if first is None else first
        before = life.first_step
        for step, at in sorted(step_ends(life).items()):
            if step in took:
                repeated_s, repeated = repeated_s + took[step], repeated + 1
            took[step] = max(0.0, at - before)
            before = ended = max(before, at)
    return StampedTime(
        wall_s=ended - began,
        startup_s=(first if first is not None else ended) - began,
        useful_s=sum(took.values()),
        repeated_s=repeated_s,
        steps=len(took),
        repeated_steps=repeated,
    )


def step_ends(life: Life) -> dict[int, float]:
    """Return when each step of a life was done by the last rank that did it."""
    found: dict[int, float] = {}
    for at, step in life.ends:
        found[step] = max(at, found.get(step, 0.0))
    return found


def repeated_after(lives: Sequence[Life], moment: float) -> int | None:
    """Return how many steps the first life after ``moment`` did again; None where none began."""
    new = next((life for life in lives if (life.first_step or 0.0) > moment), None)
    if new is None or not new.ends:
        return None
    done = max((step for life in lives for at, step in life.ends if at <= (new.first_step or 0.0)), default=-1)
    return max(0, done + 1 - min(step for _, step in new.ends))


def read_digests(directories: Sequence[Path]) -> dict[int, set[str]]:
    """Return what rank 0 held after each step, in all lives that did it."""
    found: dict[int, set[str]] = {}
    for directory in directories:
        for path in directory.iterdir() if directory.is_dir() else ():
            lines = path.read_text(errors="replace").split("\n")
            for line in lines[:-1]:  # what is behind the last end of a line was torn by a power cut
                step, _, digest = line.partition(" ")
                if step.isdecimal() and digest:
                    found.setdefault(int(step), set()).add(digest)
    return found


def differences(mine: Mapping[int, set[str]], twin: Mapping[int, set[str]]) -> tuple[int, list[int]]:
    """Return how many steps both runs did, and after which of them they did not hold the same bits."""
    both = sorted(set(mine) & set(twin))
    return len(both), [step for step in both if len(mine[step] | twin[step]) > 1]
