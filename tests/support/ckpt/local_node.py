"""For the tests of the node's own disk: a node of two ranks, whose saver works in this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import Answer, Commit, Committed, Local, Persist, Persisted, Progress
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.ckpt.tiers.bounded_io import PATIENCE, Patience
from resilio_hpc.core.file_system import is_of_this_machine

POOL = ThreadPoolExecutor(1)
WORLD = 2


class Node:
    """A node of two ranks: its arenas, its own disk, and the shared directory."""

    patience: Patience = PATIENCE
    """With its disk."""
    keep = 1
    """Committed steps on its disk."""

    def __init__(self, arenas: Path, disk: Path, shared: Path) -> None:
        self.arenas, self.disk, self.shared = arenas, disk, shared
        self.progress: list[Progress] = []

    def take(self, step: int, size: int = 1000) -> list[str]:
        """Both ranks take a snapshot; their arenas."""
        paths = []
        for rank in range(WORLD):
            pair = ArenaPair(self.arenas, Owner(rank, rank, WORLD, WORLD, 0, "own", "run"), self.arenas / "spill")
            state = {"x": np.full(size, 100 * step + rank), "y": np.full(3, step, dtype=np.int8), "rank": rank}
            paths.append(str(Snapshot(pair, step, flatten(state), POOL).finish()[0]))
            pair.close()
        return paths

    def persist(
        self, step: int, round_: int = 0, size: int = 1000, then: Callable[[], object] = lambda: None
    ) -> Answer:
        """``then``: what happens as soon as the saver says that the file is on the node's own disk."""

        def say(progress: Progress) -> None:
            self.progress.append(progress)
            if isinstance(progress, Local):
                then()

        arenas = self.take(step, size)
        asked = Persist(step, 1, round_, WORLD, 0, arenas, str(self.shared), str(self.disk), "n1", local_keep=self.keep)
        return saver.serve(asked, say, patience=self.patience)

    def commit(self, answer: Answer, round_: int = 0) -> None:
        assert isinstance(answer, Persisted), answer
        done = saver.serve(
            Commit(answer.step, 1, round_, WORLD, str(self.shared), [answer.record], Retention(self.keep + 1))
        )
        assert isinstance(done, Committed), done

    @property
    def held(self) -> Path:
        """The only directory that this node made on its disk."""
        (found,) = self.disk.iterdir()
        return found

    @property
    def steps(self) -> list[str]:
        return sorted(path.name for path in self.held.iterdir() if path.name != "held")

    def copy(self, step: int, round_: int = 0) -> Path:
        return self.held / f"step-{step:010d}-e1-r{round_}" / "node-0.h5"

    def is_committed(self, step: int) -> bool:
        """Whole, with the content of ``take``."""
        return verify_step(self.shared, checkpoint_index.manifest_of(self.shared, step)) == []


@contextmanager
def node_in(directory: Path) -> Iterator[Node]:
    """A node whose arenas lie in shared memory."""
    disk, shared = directory / "disk", directory / "shared"
    disk.mkdir()
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Node(Path(name), disk, shared)


def flip(path: Path, at: int) -> None:
    """One bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << at % 8]))


def worn_in(directory: Path) -> list[str]:
    """What is left of a removed step for the next one, in a directory of steps: nothing where none is written over."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        return [".worn"] if is_of_this_machine(fd) else []
    finally:
        os.close(fd)


def lose_tensors(checkpoints: Path, manifest: Manifest) -> None:
    """Whoever reads them from the committed files fails; tables and trees are there."""
    directory = checkpoint_index.step_directory(checkpoints, manifest.step)
    for shard in manifest.shards:
        with ShardReader(directory, shard) as reader, (directory / shard.file).open("r+b") as file:
            for tensor in (tensor for rank in shard.ranks for tensor in reader.table(rank).tensors):
                if tensor.offset >= 0:
                    os.pwrite(file.fileno(), bytes([255]) * tensor.size_bytes, tensor.offset)
