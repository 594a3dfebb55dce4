"""Many seeds on all cores."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from simulator.run import Outcome, simulate

CHUNK = 100  # seeds that a process runs before it reports


@dataclass
class Found:
    """What came out of many runs."""

    verdicts: Counter[str] = field(default_factory=Counter)
    violations: list[Outcome] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(self.verdicts.values())

    def take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.verdicts[outcome.verdict or "none"] += 1
            if outcome.violation:
                self.violations.append(outcome)


def some(seeds: range) -> list[Outcome]:
    """In this process."""
    gc.disable()  # worlds are circles of references: collected when some of them are gone
    outcomes = []
    for seed in seeds:
        outcomes.append(simulate(seed))
        if seed % 10 == 0:
            gc.collect()
    gc.enable()
    return outcomes


def search(first: int, count: int, at_most: int = 1, progress: Callable[[Found], None] = lambda found: None) -> Found:
    """Run ``count`` seeds from ``first``; stop when ``at_most`` have failed."""
    found = Found()
    workers = min(os.cpu_count() or 1, 1 + count // CHUNK)
    context = get_context("spawn")
    pipes: dict[Connection, SpawnProcess] = {}
    for index in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, first, count, index, workers), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = process
    try:
        while pipes and len(found.violations) < at_most:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                _receive(pipe, pipes, found)
                progress(found)
    finally:
        for process in pipes.values():
            process.kill()
    found.violations.sort(key=lambda outcome: outcome.seed)
    return found


def _receive(pipe: Connection, pipes: dict[Connection, SpawnProcess], found: Found) -> None:
    try:
        outcomes = pipe.recv()
    except EOFError:
        outcomes = None
    if outcomes:
        found.take(outcomes)
        return
    process = pipes.pop(pipe)
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"a process of the search ended with {process.exitcode}")


def _work(pipe: Connection, first: int, count: int, index: int, workers: int) -> None:
    """Every ``workers``-th chunk."""
    for begin in range(first + index * CHUNK, first + count, workers * CHUNK):
        pipe.send(some(range(begin, min(begin + CHUNK, first + count))))
    pipe.close()
