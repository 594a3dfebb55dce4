"""Checkpointers of others, each as its documentation has it used, with the settings that suit it best here.

They run in the peers' own environment (``peers_setup.sh``). Where they have no word for it, this adds what a careful
user would: a save waits for the one before it (DLRover would leave it out instead), files and directories are synced
once they say that they are done, and older steps are removed.
"""

from __future__ import annotations

import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from checkpoint_methods import Dcp, Method, Place, assign, below, sync

POLL_S = 0.002
THREADS = 2
"""Processes that write for one rank of NVRx, as Megatron-LM has it."""


class OneAtATime(Method):
    """``begin`` starts a save; what it returns waits until the peer says that it is done."""

    under_way: Callable[[], None] | None = None

    def save(self, step: int) -> Callable[[], None]:
        self.finish()
        self.under_way = self.begin(step)

        def wait() -> None:
            self.finish()
            sync(self.written(step))

        return wait

    def finish(self) -> None:
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way()

    @abstractmethod
    def begin(self, step: int) -> Callable[[], None]: ...

    @abstractmethod
    def written(self, step: int) -> Iterable[Path]:
        """Files and directories that hold the step."""


class NvrxFork(OneAtATime, Dcp):
    """nvidia-resiliency-ext: files of torch.distributed.checkpoint, written by a process forked at each save."""

    persistent = False
    needs_group = True

    def __init__(self, directory: Path, state: dict[str, Any], place: Place) -> None:
        super().__init__(directory, state, place)
        import torch
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None  # it is called always; without a GPU that is an error
        self.queue = AsyncCallsQueue(persistent=self.persistent)

    def begin(self, step: int) -> Callable[[], None]:
        from functools import partial

        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver
        from torch.distributed.checkpoint import DefaultSavePlanner

        writer = filesystem_async.FileSystemWriterAsync(self.directory / "dcp", thread_count=THREADS)
        planned = state_dict_saver.save_state_dict_async_plan(self.state, writer, planner=DefaultSavePlanner())
        write, _, arguments = writer.get_save_function_and_args()
        stage = partial(writer.preload_tensors, writer.write_buckets, False)  # else it waits for a GPU
        finalize = partial(state_dict_saver.save_state_dict_async_finalize, *planned)
        request = core.AsyncRequest(write, arguments, [finalize], preload_fn=stage)
        self.queue.schedule_async_request(request)
        return self.wait_for_queue

    def wait_for_queue(self) -> None:
        while self.queue.get_num_unfinalized_calls():
            self.queue.maybe_finalize_async_calls(no_dist=True)
            time.sleep(POLL_S)

    def written(self, step: int) -> Iterable[Path]:
        return below(self.directory / "dcp")


class NvrxWorker(NvrxFork):
    """The same with one process that stays, its default.

    It stages what is on a GPU; tensors of the CPU it shares with the training process, and writes them as they are by
    then.
    """

    persistent = True


class TorchSnapshot(OneAtATime):
    def begin(self, step: int) -> Callable[[], None]:
        import torchsnapshot

        self.path = self.directory / str(step)
        pending = torchsnapshot.Snapshot.async_take(str(self.path), {"state": torchsnapshot.StateDict(**self.state)})

        def wait() -> None:
            pending.wait()

        return wait

    def written(self, step: int) -> Iterable[Path]:
        return [*below(self.directory / str(step)), self.directory]

    def load(self) -> None:
        import torchsnapshot

        loaded = torchsnapshot.StateDict(**self.state)
        torchsnapshot.Snapshot(str(self.path)).restore({"state": loaded})
        assign(self.state, {name: tensor for name, tensor in loaded.items() if tensor is not self.state[name]})

    def tidy(self) -> None:
        if self.place.rank == 0:
            for old in set(self.directory.iterdir()) - {self.path}:
                shutil.rmtree(old)


class DlroverFlash(OneAtATime):
    """Flash checkpoint to disk: copied to shared memory, from which a process of its own writes.

    It removes older steps itself. Its load prefers that memory; without it, it reads what the last step's file has.
    """

    def __init__(self, directory: Path, state: dict[str, Any], place: Place) -> None:
        super().__init__(directory, state, place)
        from dlrover.python.common.storage import KeepLatestStepStrategy
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self.checkpointer = DdpCheckpointer(
            str(directory),
            local_shard_num=place.world_size,
            global_shard_num=place.world_size,
            deletion_strategy=KeepLatestStepStrategy(1, str(directory)),
        )
        self.tracker = directory / "dlrover_latest.txt"

    def begin(self, step: int) -> Callable[[], None]:
        self.checkpointer.save_checkpoint(step, self.state)
        if self.checkpointer._engine.latest_step != step:
            raise RuntimeError(f"DLRover left step {step} out")

        def wait() -> None:
            while not self.tracker.exists() or self.tracker.read_text() != str(step):
                time.sleep(POLL_S)

        return wait

    def written(self, step: int) -> Iterable[Path]:
        return [*below(self.directory / str(step)), self.tracker, self.directory]

    def load(self) -> None:
        assign(self.state, self.checkpointer._engine._load_from_storage())

    def load_memory(self) -> None:
        assign(self.state, self.checkpointer.load_checkpoint())


PEERS: dict[str, type[Method]] = {
    "nvrx fork": NvrxFork,
    "nvrx worker": NvrxWorker,
    "torchsnapshot": TorchSnapshot,
    "dlrover flash": DlroverFlash,
}
