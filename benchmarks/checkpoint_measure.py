"""One method, in a process of its own: ``python checkpoint_measure.py METHOD BYTES SAVES DIRECTORY [warm]``.

Tells (see ``checkpoint_processes``) seconds of each save (``blocked`` until it returns; ``effective`` with what the
next update of the tensors takes longer; ``durable`` until the bytes are on disk) and of each load (``cold``,
``memory``); and in how many tensors each kind of load gave something else than what was saved (``wrong``).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint_methods import METHODS, Method, drop_caches, update
from checkpoint_peers import PEERS
from checkpoint_processes import join, place, tell, tell_failures

TENSORS = 240
UPDATES = 5
SAMPLES = 16
FIGURES = ("blocked", "effective", "durable", "cold", "memory", "wrong")
Fingerprint = dict[str, tuple[int, list[int]]]


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def make_state(size: int, rank: int) -> dict[str, Any]:
    """Names that no other process has: the tensors are this one's own part of the whole state."""
    import torch

    each = size // TENSORS // 4
    return {f"{rank}.layer.{number}.weight": torch.rand(each) for number in range(TENSORS)}


def fingerprint(state: dict[str, Any]) -> Fingerprint:
    """Of every tensor of four-byte values: the sum of its bits as integers, and some of them."""
    import torch

    found = {}
    for name, tensor in state.items():
        bits = tensor.detach().view(-1).view(torch.int32)
        found[name] = int(bits.sum()), bits[:: max(1, len(bits) // SAMPLES)].tolist()
    return found


def differing(saved: Fingerprint, loaded: Fingerprint) -> int:
    """In how many tensors."""
    return sum(loaded.get(name) != bits for name, bits in saved.items())


def save(method: Method, saves: int, meet: Callable[[], None], found: dict[str, list[float]]) -> Fingerprint:
    """Return what the state was at the last save."""
    updates: list[float] = []
    for _ in range(UPDATES):
        with timed(updates):
            update(method.state)
    usual = statistics.median(updates)
    saved: Fingerprint = {}
    for step in range(1, saves + 1):
        if step == saves:
            saved = fingerprint(method.state)
        after: list[float] = []
        meet()
        with timed(found["durable"]):
            with timed(found["blocked"]):
                wait = method.save(step)
            with timed(after):
                update(method.state)
            wait()
        found["effective"].append(found["blocked"][-1] + max(0.0, after[0] - usual))
        if method.tidy is not None:
            method.tidy()
    return saved


def measure(method: Method, saves: int, meet: Callable[[], None], cold: bool = True) -> dict[str, list[float]]:
    """``meet``: returns when all processes that save together have come to it. ``cold``: not from the page cache."""
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    saved = save(method, saves, meet, found)
    for _ in range(2):
        method.forget()
        meet()
        if cold and method.place.rank == 0:
            drop_caches()
        meet()
        with timed(found["cold"]):
            method.load()
    found["wrong"].append(differing(saved, fingerprint(method.loaded())))
    if method.load_memory is not None:
        for _ in range(3):
            update(method.state)
            meet()
            with timed(found["memory"]):
                method.load_memory()
        found["wrong"].append(differing(saved, fingerprint(method.loaded())))
    return found


def main() -> None:
    tell_failures()
    name, size, saves, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    kind, here = (METHODS | PEERS)[name], place()
    meet = join(here, kind.needs_group)
    tell(
        measure(
            kind(directory, make_state(size // here.world_size, here.rank), here), saves, meet, sys.argv[5:] != ["warm"]
        )
    )


if __name__ == "__main__":
    main()
