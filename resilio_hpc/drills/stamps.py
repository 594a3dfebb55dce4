"""The proof from the ranks' own stamps (counting.py): at no moment did ranks of two rounds train.

All nodes of a dev cluster share one kernel, hence one clock, so stamps of different nodes can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Life:
    """One life of all ranks: a process group, known by the number that its rank 0 drew. Times are Unix seconds."""

    token: str
    epoch: int  # of the controller that started it; rounds are counted within an epoch
    round: int
    nodes: set[str] = field(default_factory=set)
    first_step: float | None = None  # when the first of its ranks began its first step
    last_sign: float = 0.0  # when any of its ranks was last known to live
    last_node: str = ""
    ends: list[tuple[float, int]] = field(default_factory=list)  # when a rank had done which step

    @property
    def name(self) -> str:
        """As it is told."""
        return f"round {self.round} of epoch {self.epoch}"


def read_lives(directories: Iterable[tuple[str, Path]]) -> list[Life]:
    """All lives that left stamps on the nodes (name, directory), in the order of their first steps."""
    lives: dict[str, Life] = {}
    for node, directory in directories:
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            token, epoch, number, _, _ = path.name.split(".")
            life = lives.setdefault(token, Life(token, int(epoch), int(number)))
            life.nodes.add(node)
            for line in path.read_text().splitlines():
                _add(life, node, line.split())
    return sorted(
        (life for life in lives.values() if life.first_step is not None), key=lambda life: life.first_step or 0
    )


def _add(life: Life, node: str, words: list[str]) -> None:
    if len(words) != 3:
        return  # torn by a power cut
    kind, step, at = words[0], int(words[1]), float(words[2])
    if kind == "b" and (life.first_step is None or at < life.first_step):
        life.first_step = at
    if kind == "e":
        life.ends.append((at, step))
    if at > life.last_sign:
        life.last_sign, life.last_node = at, node


def overlap(lives: Sequence[Life]) -> str:
    """Return what is wrong with lives in the order of their first steps; "" when each ended before the next began.

    Pure.
    """
    for index, old in enumerate(lives):
        for new in lives[index + 1 :]:
            if new.first_step is not None and old.last_sign > new.first_step:
                late = old.last_sign - new.first_step
                return (
                    f"{old.name} was alive on {old.last_node} {late:.3f} s after {new.name} "
                    f"had begun its first step on {', '.join(sorted(new.nodes))}"
                )
            if (new.epoch, new.round) <= (old.epoch, old.round):
                return f"{new.name} began after {old.name}: their numbers must grow"
    return ""


def first_end_after(lives: Sequence[Life], moment: float) -> float | None:
    """When a life that began after ``moment`` had done a step for the first time; None when none did. Pure."""
    ends = [end[0] for life in lives if (life.first_step or 0) > moment for end in life.ends]
    return min(ends, default=None)


def repeated_steps(lives: Sequence[Life]) -> int:
    """Return how many steps were done again by a later life. Pure."""
    done, again = -1, 0
    for life in lives:
        steps = {step for _, step in life.ends}
        if steps:
            again += max(0, done + 1 - min(steps))
            done = max(done, *steps)
    return again


def longest_pause(lives: Sequence[Life]) -> float:
    """Return the longest time, in seconds, in which no rank ended a step. Pure."""
    moments = sorted(end[0] for life in lives for end in life.ends)
    return max((later - earlier for earlier, later in itertools.pairwise(moments)), default=0.0)


def steps_left_out(lives: Sequence[Life]) -> str:
    """Whether a life went on behind a step that no rank had done; "" when none did. Pure."""
    done = -1
    for life in lives:
        steps = {step for _, step in life.ends}
        if steps and min(steps) > done + 1:
            return f"{life.name} began with step {min(steps)}, but step {done + 1} was never done"
        done = max(done, *steps) if steps else done
    return ""


def steps_between(lives: Sequence[Life], begin: float, end: float) -> int:
    """How many different steps were ended in a span of time. Pure."""
    return len({step for life in lives for at, step in life.ends if begin < at < end})
