"""Many seeds on all cores."""

from __future__ import annotations

import gc
import os
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import pytest

from resilio_hpc.launch.process.process_tree import die_with_parent
from tests.support.simulator.mutations import MUTATIONS
from tests.support.simulator.run import Outcome, simulate

CHUNK = 100  # seeds that a process runs before it reports
MEMORY = 4 << 30  # bytes of address space that a process may use


@dataclass
class Found:
    """What came out of many runs."""

    verdicts: Counter[str] = field(default_factory=Counter)
    violations: list[Outcome] = field(default_factory=list)
    felt: Counter[str] = field(default_factory=Counter)
    most_events: int = 0

    @property
    def runs(self) -> int:
        return sum(self.verdicts.values())

    def take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.verdicts[outcome.verdict or "none"] += 1
            self.felt.update(dict(outcome.felt))
            self.most_events = max(self.most_events, outcome.events)
            if outcome.violation:
                self.violations.append(outcome)

    def add(self, other: Found) -> None:
        """What came out of other runs, too."""
        self.verdicts.update(other.verdicts)
        self.felt.update(other.felt)
        self.most_events = max(self.most_events, other.most_events)
        self.violations += other.violations


def some(seeds: range, mutation: str = "") -> list[Outcome]:
    """In this process. ``mutation``: a bug that is planted first, see ``mutations``."""
    gc.collect()
    gc.freeze()
    gc.disable()  # worlds are circles of references: collected when some of them are gone
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        if mutation:
            MUTATIONS[mutation](patch)
        for seed in seeds:
            outcomes.append(simulate(seed))
            if seed % 10 == 0:
                gc.collect()
    gc.enable()
    gc.unfreeze()
    return outcomes


def search(
    first: int,
    count: int,
    at_most: int = 1,
    progress: Callable[[Found], None] = lambda found: None,
    mutation: str = "",
) -> Found:
    """Run ``count`` seeds from ``first``; stop when ``at_most`` have failed."""
    found = Found()
    workers = min(os.cpu_count() or 1, 1 + count // CHUNK)
    context = get_context("spawn")
    pipes: dict[Connection, SpawnProcess] = {}
    for index in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        work = (
            theirs,
            os.getpid(),
            range(first + index * CHUNK, first + count, workers * CHUNK),
            first + count,
            mutation,
        )
        process = context.Process(target=_work, args=work, daemon=True)
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
            process.join()
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


def _work(pipe: Connection, parent: int, begins: range, end: int, mutation: str) -> None:
    """Every so many chunks; ends with ``parent``, and with its memory bounded."""
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for begin in begins:
        pipe.send(some(range(begin, min(begin + CHUNK, end)), mutation))
    pipe.close()
