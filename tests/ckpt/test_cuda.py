"""Snapshots from a real GPU: ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
WIDTH = 2048


class Training:
    def __init__(self, layers: int = 8) -> None:
        torch.manual_seed(1)
        linear = [torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(layers)]
        self.model = torch.nn.Sequential(*linear, torch.nn.BatchNorm1d(WIDTH, device="cuda"))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.model(torch.rand(64, WIDTH, device="cuda")).square().mean().backward()

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def values(self) -> list[torch.Tensor]:
        model, state = self.model.state_dict(), self.optimizer.state_dict()["state"]
        return [value.clone() for value in (*model.values(), *[v for one in state.values() for v in one.values()])]


def test_what_is_saved_is_the_state_before_the_next_step_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    training, checkpoint = Training(), Checkpointer(tmp_path, overlap=True)
    for step in range(5):
        before = training.values()
        handle = checkpoint.save(step, training.state())
        training.backward()
        training.optimizer.step()
    handle.wait("committed", 120)
    fresh = Training()
    assert Checkpointer(tmp_path).restore(fresh.state()) is not None
    assert all(torch.equal(a, b) for a, b in zip(fresh.values(), before, strict=True))


def test_odd_tensors_come_back_and_take_little_memory_of_the_device(tmp_path: Path) -> None:
    tensors = [
        torch.rand(9000, 9001, device="cuda").t(),
        torch.rand(60_000_000, device="cuda")[::2],
        torch.rand(40, 40, dtype=torch.complex64, device="cuda").conj(),
        torch.rand(100_000_001, device="cuda"),
        torch.rand(3, device="cuda").to(torch.float8_e4m3fn),
        torch.empty(0, 3, device="cuda"),
        torch.tensor(7.0, device="cuda"),
    ]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    Checkpointer(tmp_path).save(1, tensors).wait("committed", 120)
    assert torch.cuda.max_memory_allocated() - held <= 64 << 20
    found = Checkpointer(tmp_path).restore()
    assert found is not None
    for saved, back in zip(tensors, found[1], strict=True):
        assert saved.dtype == back.dtype
        assert torch.equal(saved.cpu().contiguous().view(torch.uint8), back.contiguous().view(torch.uint8))
