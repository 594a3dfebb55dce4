"""Many seeds on all cores."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

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


def some(first: int, count: int) -> list[Outcome]:
    """In this process."""
    gc.disable()  # worlds are circles of references: collected when many of them are gone
    try:
        return [simulate(seed) for seed in range(first, first + count)]
    finally:
        gc.enable()
        gc.collect()


def search(first: int, count: int, at_most: int = 1, progress: Callable[[Found], None] = lambda found: None) -> Found:
    """Run ``count`` seeds from ``first``; stop when ``at_most`` have failed."""
    found = Found()
    chunks = iter(range(first, first + count, CHUNK))
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: set[Future[list[Outcome]]] = set()
        for outcomes in _in_turn(pool, running, chunks, first + count, 2 * workers):
            found.take(outcomes)
            progress(found)
            if len(found.violations) >= at_most:
                break
        for future in running:
            future.cancel()
    found.violations.sort(key=lambda outcome: outcome.seed)
    return found


def _in_turn(
    pool: ProcessPoolExecutor, running: set[Future[list[Outcome]]], chunks: Iterator[int], end: int, at_once: int
) -> Iterator[list[Outcome]]:
    while True:
        while len(running) < at_once and (begin := next(chunks, None)) is not None:
            running.add(pool.submit(some, begin, min(CHUNK, end - begin)))
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        running -= done
        for future in done:
            yield future.result()
