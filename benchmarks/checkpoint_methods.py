"""One way to save and load, in a process of its own: ``python checkpoint_methods.py METHOD BYTES SAVES DIRECTORY``.

Prints JSON: seconds of each save (``blocked`` until it returns; ``effective`` with what the next update of the tensors
takes longer; ``durable`` until the bytes are on disk) and of each load (``cold``, ``memory``). The limits of the
machine are methods too: the same bytes in one piece, without any format.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TENSORS = 240
CHUNK, DEPTH = 8 << 20, 4
UPDATES = 5


class Method(ABC):
    """``load_memory``, for those that have it: back into the tensors of the state from this node's memory."""

    load_memory: Callable[[], None] | None = None

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self.directory = directory
        self.state = state

    @abstractmethod
    def save(self, step: int) -> Callable[[], None]:
        """Return as soon as training may go on; what is returned waits until the bytes are durable."""

    @abstractmethod
    def load(self) -> None:
        """Back into the tensors of the state, from disk."""


class Ours(Method):
    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        from resilio_hpc import ckpt

        self.checkpointer = ckpt.Checkpointer(directory, keep_last=1)
        self.step = 0

    def save(self, step: int) -> Callable[[], None]:
        self.step = step
        handle = self.checkpointer.save(step, self.state)
        return lambda: handle.wait("committed", 600)

    def load(self) -> None:
        assert self.checkpointer.restore(self.state, self.step) is not None

    def load_memory(self) -> None:
        from resilio_hpc.ckpt.arena_source import ArenaSource
        from resilio_hpc.ckpt.restore import restore

        path = self.checkpointer._open_arenas().held(self.step)
        assert path is not None
        with ArenaSource(path) as source:
            restore(source, self.state, self.checkpointer._pool)


class TorchSave(Method):
    def save(self, step: int) -> Callable[[], None]:
        import torch

        path = self.directory / "state.pt"
        torch.save(self.state, path)
        return lambda: sync([path])

    def load(self) -> None:
        import torch

        assign(self.state, torch.load(self.directory / "state.pt", mmap=False))


class Safetensors(Method):
    def save(self, step: int) -> Callable[[], None]:
        from safetensors.torch import save_file

        path = self.directory / "state.safetensors"
        save_file(self.state, path)
        return lambda: sync([path])

    def load(self) -> None:
        from safetensors.torch import load_file

        assign(self.state, load_file(self.directory / "state.safetensors"))


class Dcp(Method):
    def save(self, step: int) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=self.directory / "dcp", no_dist=True)
        return lambda: sync((self.directory / "dcp").iterdir())

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state, checkpoint_id=self.directory / "dcp", no_dist=True)


class DcpAsync(Dcp):
    process = False

    def save(self, step: int) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        options: dict[str, Any] = {}
        if self.process:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            if not hasattr(self, "stager"):
                self.stager = DefaultStager(StagingOptions(True, True, False, False))
            options["async_stager"] = self.stager
        done = dcp.async_save(
            self.state,
            checkpoint_id=self.directory / "dcp",
            no_dist=not self.process,
            async_checkpointer_type=kind,
            **options,
        )
        done = getattr(done, "upload_completion", done)

        def wait() -> None:
            done.result(600)
            sync((self.directory / "dcp").iterdir())

        return wait


class DcpAsyncProcess(DcpAsync):
    """Its helper process needs a process group, of one."""

    process = True

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)


class Limit(Method):
    """The bytes of the state in one piece: one copy into memory that is there already, then plain direct writes."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        super().__init__(directory, state)
        import torch

        self.size = sum(tensor.nbytes for tensor in state.values())
        self.size += -self.size % 4096
        fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
        os.ftruncate(fd, self.size)
        self.room = mmap.mmap(fd, self.size)
        self.bytes = torch.frombuffer(self.room, dtype=torch.uint8)
        self.bytes.zero_()
        self.path = directory / "bytes"

    def save(self, step: int) -> Callable[[], None]:
        at = 0
        for tensor in self.state.values():
            self.bytes[at : at + tensor.nbytes].copy_(tensor.view(-1).view(self.bytes.dtype))
            at += tensor.nbytes
        return self._write

    def _write(self) -> None:
        from resilio_hpc.native import direct_io

        self.path.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        direct_io.write(fd, self.room, [(0, 0, self.size)], [], DEPTH, CHUNK, 0.0, True)
        os.fsync(fd)
        os.close(fd)
        sync([self.directory])

    def load(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        room = memoryview(self.room)
        for at in range(0, self.size, CHUNK):
            os.preadv(fd, [room[at : at + CHUNK]], at)
        os.close(fd)

    def load_memory(self) -> None:
        at = 0
        for tensor in self.state.values():
            tensor.view(-1).view(self.bytes.dtype).copy_(self.bytes[at : at + tensor.nbytes])
            at += tensor.nbytes


METHODS: dict[str, type[Method]] = {
    "limit": Limit,
    "ours": Ours,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save process": DcpAsyncProcess,
}


def sync(paths: Iterable[Path]) -> None:
    """As a careful user would add it: most methods leave their bytes to the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def assign(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    for name, tensor in loaded.items():
        state[name].copy_(tensor)


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into.append(time.perf_counter() - began)


def make_state(size: int) -> dict[str, Any]:
    import torch

    each = size // TENSORS // 4
    return {f"layer.{number}.weight": torch.rand(each) for number in range(TENSORS)}


def update(state: dict[str, Any]) -> None:
    for tensor in state.values():
        tensor.add_(1.0)


def measure(method: Method, saves: int) -> dict[str, list[float]]:
    updates: list[float] = []
    for _ in range(UPDATES):
        with timed(updates):
            update(method.state)
    usual = statistics.median(updates)
    found: dict[str, list[float]] = {name: [] for name in ("blocked", "effective", "durable", "cold", "memory")}
    for step in range(1, saves + 1):
        after: list[float] = []
        with timed(found["durable"]):
            with timed(found["blocked"]):
                wait = method.save(step)
            with timed(after):
                update(method.state)
            wait()
        found["effective"].append(found["blocked"][-1] + max(0.0, after[0] - usual))
    for _ in range(2):
        drop_caches()
        with timed(found["cold"]):
            method.load()
    if method.load_memory is not None:
        for _ in range(3):
            with timed(found["memory"]):
                method.load_memory()
    return found


def main() -> None:
    name, size, saves, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    print(json.dumps(measure(METHODS[name](directory, make_state(size)), saves)), flush=True)
    os._exit(0)  # the helpers of some methods do not end by themselves


if __name__ == "__main__":
    main()
