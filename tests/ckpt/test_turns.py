"""One Checkpointer in many hands: threads take turns, a forked child and a signal handler are refused at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.dcp.__init__ import ResilioReader
from resilio_hpc.core.errors import ResilioError, UsageError
from tests.support.waiting import PATIENCE_S


def test_threads_that_save_and_restore_take_turns(tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, keep_last=99)
    bad: list[object] = []

    def work(first: int) -> None:
        for step in range(first, first + 2):
            checkpoint.save(step, {"x": np.full(100_000, step)}).wait(timeout_s=PATIENCE_S)
            found, state = checkpoint.restore(step=step) or (0, {})
            if found != step or not (state["x"] == step).all():
                bad.append((step, found))

    threads = [threading.Thread(target=work, args=(first,)) for first in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not bad
    assert sorted(checkpoint.steps()) == [10, 11, 20, 21, 30, 31]


def said_in_a_child(act: Callable[[], object]) -> str:
    """What it raises there; "" for nothing. The child is killed where it hangs."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            act()
        except ResilioError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    assert os.waitpid(pid, 0)[1] == 0, "it hung"
    return text


def test_a_forked_child_is_refused_at_once_and_its_optimizer_does_not_wait(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    checkpoint = Checkpointer(tmp_path, overlap=True)
    state: dict[str, Any] = {"x": np.ones(1_000_000), "weight": weight, "optimizer": optimizer}
    handle = checkpoint.save(1, state)
    refused = "UsageError: this Checkpointer is of process"
    assert said_in_a_child(lambda: checkpoint.save(2, state)).startswith(refused)
    assert said_in_a_child(lambda: checkpoint.restore(state)).startswith(refused)
    assert said_in_a_child(checkpoint.fence) == ""
    assert said_in_a_child(optimizer.step) == ""
    assert said_in_a_child(handle.wait).startswith("UsageError: this SaveHandle is of process")
    handle.wait(timeout_s=PATIENCE_S)
    checkpoint.save(4, state).wait(timeout_s=PATIENCE_S)
    assert checkpoint.steps() == [1, 4]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_restore_waits_for_the_saves_of_its_own_process(tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path)
    checkpoint.save(7, {"x": np.arange(2_000_000)})
    found, state = checkpoint.restore() or (0, {})
    assert (found, state["x"][-1]) == (7, 1_999_999)
    checkpoint.save(8, {"x": np.arange(2_000_000)})
    assert (Checkpointer(tmp_path).restore() or (0,))[0] == 8
    checkpoint.save(9, {"x": torch.arange(2_000_000)})
    loaded = {"x": torch.zeros(2_000_000, dtype=torch.int64)}
    reader = ResilioReader(tmp_path)
    dcp.load(loaded, storage_reader=reader)
    assert reader.checkpoint_id == str(tmp_path / "step-0000000009")


def test_a_signal_handler_that_saves_in_the_middle_of_a_save_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path)
    refused: list[str] = []

    class Interrupted:
        def state_dict(self) -> dict[str, int]:
            signal.raise_signal(signal.SIGUSR1)
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    def save(*_: object) -> None:
        with pytest.raises(UsageError, match="a signal handler had better set a flag") as raised:
            checkpoint.save(2, {"x": 2})
        refused.append(str(raised.value))

    before = signal.signal(signal.SIGUSR1, save)
    try:
        checkpoint.save(1, {"object": Interrupted()}).wait(timeout_s=PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert checkpoint.steps() == [1]
