"""A directory of checkpoints in each kind of store, and saves to it in this process, whose calls can be hooked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from resilio_hpc.ckpt import Checkpointer, Slab
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Answer, Commit, Persist, Persisted
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store import checkpoint_index, fence
from resilio_hpc.ckpt.store.backend import Store
from resilio_hpc.ckpt.store.mounts import mount
from resilio_hpc.ckpt.store.posix import PosixStore
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.verify import verify_step
from tests.support.ckpt.hooked_store import Hook, HookedStore
from tests.support.ckpt.memory_store import MemoryStore, Tree

KINDS = ("file system", "memory", "memory, listed stale")
WORLD = 2
PART = 1500


@dataclass
class Place:
    """``directory``: of checkpoints. ``before``: see HookedStore; it may be set at any time."""

    directory: Path
    store: Store
    scratch: Path
    before: list[Hook] = field(default_factory=list)

    def hook(self, name: str) -> None:
        """Do what the test wants before a call."""
        for each in list(self.before):
            each(name)

    def persist(self, step: int, epoch: int) -> Answer:
        """Write the shard file of both ranks."""
        paths = []
        with ExitStack() as stack:
            for rank in range(WORLD):
                owner = Owner(rank, rank, WORLD, WORLD, 0, "own", "run")
                arenas = stack.enter_context(closing(ArenaPair(None, owner, self.scratch)))
                with ThreadPoolExecutor(1) as pool:
                    paths.append(str(Snapshot(arenas, step, flatten(state_of(step, rank)), pool).finish()[0]))
            return saver.serve(Persist(step, epoch, 0, WORLD, 0, paths, str(self.directory)))

    def save(self, step: int, epoch: int = 1, keep_last: int = 1) -> Answer:
        """Write and commit a step."""
        answer = self.persist(step, epoch)
        if not isinstance(answer, Persisted):
            return answer
        return saver.serve(
            Commit(step, epoch, 0, WORLD, str(self.directory), [answer.record], Retention(keep_last=keep_last))
        )

    def take_over(self, epoch: int) -> None:
        """Begin as a new controller does."""
        self.store.make_directory(self.directory)
        fence.raise_fence(self.directory, epoch)

    def steps(self) -> list[int]:
        """All committed steps, each of whose bytes is right."""
        found = checkpoint_index.committed(self.directory)
        for manifest in found:
            assert verify_step(self.directory, manifest) == []
        return [manifest.step for manifest in found]

    def restored(self) -> int:
        """The step that a new process restores, whose content is right."""
        whole = np.zeros(WORLD * PART, dtype=np.int64)
        found = Checkpointer(self.directory).restore({"x": Slab(whole, whole.shape, (0,)), "step": 0, "rank": -1})
        assert found is not None
        step, state = found
        assert np.array_equal(whole, np.concatenate([part_of(step, rank) for rank in range(WORLD)]))
        assert (state["step"], state["rank"]) == (step, 0)
        return step


def part_of(step: int, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A rank's part of a tensor: more than a page, in no whole pages."""
    return np.arange(PART, dtype=np.int64) * step + rank


def state_of(step: int, rank: int) -> dict[str, Any]:
    """What a rank saves."""
    return {"x": Slab(part_of(step, rank), (WORLD * PART,), (PART * rank,)), "step": step, "rank": rank}


@contextmanager
def place_in(kind: str, directory: Path, scratch: Path) -> Iterator[Place]:
    """Give a directory of checkpoints in a store of that kind.

    ``directory``: where it is on the file system; in memory there is nothing of that name outside of the store.
    """
    tree = Tree(Path("/nowhere"))
    store: Store = PosixStore() if kind == "file system" else MemoryStore(tree, kind.endswith("stale"))
    top = directory if kind == "file system" else tree.root
    place = Place(top / "checkpoints", store, scratch)
    with mount(top, HookedStore(store, place.hook)):
        yield place
    tree.close()
