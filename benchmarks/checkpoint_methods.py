"""Ways to save and load a state of CPU tensors: ours, those that come with torch, safetensors.

The limits of the machine are a method too: the same bytes in one piece, without any format. The others are in
``checkpoint_peers``.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK, DEPTH = 8 << 20, 4


@dataclass(frozen=True)
class Place:
    """Which process this is, of those that save together."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Place:
        return cls(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))


class Method(ABC):
    """``load_memory``, for those that have it: back into the tensors of the state from this node's memory.

    ``tidy``, for those that neither overwrite nor remove older saves: does so. ``needs_group``: also a process that is
    alone must be in a process group.
    """

    load_memory: Callable[[], None] | None = None
    tidy: Callable[[], None] | None = None
    needs_group = False

    def __init__(self, directory: Path, state: dict[str, Any], place: Place) -> None:
        self.directory = directory
        self.state = state
        self.place = place

    @abstractmethod
    def save(self, step: int) -> Callable[[], None]:
        """Return as soon as training may go on; what is returned waits until the bytes are durable."""

    @abstractmethod
    def load(self) -> None:
        """Back into the tensors of the state, from disk."""

    def forget(self) -> None:
        """Before a load from disk that is to be checked: nothing of what was saved is left in the state."""
        update(self.state)

    def loaded(self) -> dict[str, Any]:
        """Return the state as the last load gave it."""
        return self.state


class Ours(Method):
    def __init__(self, directory: Path, state: dict[str, Any], place: Place) -> None:
        super().__init__(directory, state, place)
        from resilio_hpc import ckpt

        self.checkpointer = ckpt.Checkpointer(directory, keep_last=2)
        self.step = 0

    def save(self, step: int) -> Callable[[], None]:
        self.step = step
        handle = self.checkpointer.save(step, self.state)
        return lambda: handle.wait("committed", 600)

    def load(self) -> None:
        assert self.checkpointer.restore(self.state, self.step) is not None

    def load_memory(self) -> None:
        from resilio_hpc.ckpt.restore.arena_source import ArenaSource
        from resilio_hpc.ckpt.restore.restore import restore

        arenas = self.checkpointer._arenas.open()
        path = arenas.held(self.step)
        assert path is not None
        with ArenaSource(path, memory=arenas.memory(self.step)) as source:
            restore(source, self.state, self.checkpointer._pool)


class OursWithoutExtensions(Ours):
    """As it is installed where there is no compiler."""

    def __init__(self, directory: Path, state: dict[str, Any], place: Place) -> None:
        os.environ["RESILIO_NO_NATIVE"] = "1"  # for its savers, too
        super().__init__(directory, state, place)
        from resilio_hpc.native import why_portable

        assert why_portable


class TorchSave(Method):
    def save(self, step: int) -> Callable[[], None]:
        import torch

        path = self.directory / f"state-{self.place.rank}.pt"
        torch.save(self.state, path)
        return lambda: sync([path, self.directory])

    def load(self) -> None:
        import torch

        assign(self.state, torch.load(self.directory / f"state-{self.place.rank}.pt", mmap=False))


class Safetensors(Method):
    def save(self, step: int) -> Callable[[], None]:
        from safetensors.torch import save_file

        path = self.directory / f"state-{self.place.rank}.safetensors"
        save_file(self.state, path)
        return lambda: sync([path, self.directory])

    def load(self) -> None:
        from safetensors.torch import load_file

        assign(self.state, load_file(self.directory / f"state-{self.place.rank}.safetensors"))


class Dcp(Method):
    def save(self, step: int) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=self.directory / "dcp", no_dist=self.alone())
        return lambda: sync(below(self.directory / "dcp"))

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state, checkpoint_id=self.directory / "dcp", no_dist=self.alone())

    def alone(self) -> bool:
        return self.place.world_size == 1 and not self.needs_group


class DcpAsync(Dcp):
    process = False
    group: Any = None
    last: Any = None

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
        if self.last is not None:
            self.last.result(600)  # saves that overlap overwrite or await each other
        if self.group is None and not self.alone() and not self.process:
            import torch.distributed as dist

            self.group = dist.new_group(backend="gloo")  # its thread's collectives would meet the training's
        done = dcp.async_save(
            self.state,
            checkpoint_id=self.directory / "dcp",
            process_group=self.group,
            no_dist=self.alone(),
            async_checkpointer_type=kind,
            **options,
        )
        done = self.last = getattr(done, "upload_completion", done)

        def wait() -> None:
            done.result(600)
            sync(below(self.directory / "dcp"))

        return wait


class DcpAsyncProcess(DcpAsync):
    process = True
    needs_group = True


class Limit(Method):
    """The bytes of the state in one piece.

    One copy into memory that is there already, then plain direct writes of a new file.
    """

    writes_over = False

    def __init__(self, directory: Path, state: dict[str, Any], place: Place) -> None:
        super().__init__(directory, state, place)
        import torch

        self.size = sum(tensor.nbytes for tensor in state.values())
        self.size += -self.size % 4096
        fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
        os.ftruncate(fd, self.size)
        self.room = mmap.mmap(fd, self.size)
        self.bytes = torch.frombuffer(self.room, dtype=torch.uint8)
        self.bytes.zero_()
        self.path = directory / f"bytes-{place.rank}"

    def save(self, step: int) -> Callable[[], None]:
        at = 0
        for tensor in self.state.values():
            self.bytes[at : at + tensor.nbytes].copy_(tensor.view(-1).view(self.bytes.dtype))
            at += tensor.nbytes
        return self._write

    def _write(self) -> None:
        from resilio_hpc.native import direct_io

        if not self.writes_over:
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

    def forget(self) -> None:
        super().forget()
        self.bytes.zero_()

    def loaded(self) -> dict[str, Any]:
        self.load_memory()
        return self.state

    def load_memory(self) -> None:
        at = 0
        for tensor in self.state.values():
            tensor.view(-1).view(self.bytes.dtype).copy_(self.bytes[at : at + tensor.nbytes])
            at += tensor.nbytes


class LimitWritingOver(Limit):
    """The same file again and again: nothing is allocated."""

    writes_over = True


METHODS: dict[str, type[Method]] = {
    "limit": Limit,
    "limit, same file": LimitWritingOver,
    "ours": Ours,
    "ours, no extensions": OursWithoutExtensions,
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


def below(directory: Path) -> list[Path]:
    """Return a directory and everything in it."""
    return [directory, *directory.rglob("*")]


def assign(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    for name, tensor in loaded.items():
        state[name].copy_(tensor)


def update(state: dict[str, Any]) -> None:
    """One step of training: every tensor changes, in place."""
    for tensor in state.values():
        tensor.add_(1.0)


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
