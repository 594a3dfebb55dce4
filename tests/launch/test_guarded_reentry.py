"""Under the real launcher: the guard of steps in a function that is entered again.

What it has learned and counted survives, nothing is reported that is no fault, and a fault after the entry is judged as
in a run that was never disturbed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

STEPS, FIRST, KILLED, SECOND = 40, 22, 26, 32
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state

kind, where = sys.argv[1:3]
run = train.attach()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters())
checkpoint = Checkpointer(layout=REPLICATED)
make = lambda: train.StepGuard(run, model, [optimizer], samples=lambda batch: f"{batch['number']} of rank {run.rank}")
kept = make() if where == "outside" else None

@train.restartable
def main():
    dist.init_process_group("gloo")
    guard = kept or make()
    state = lambda: {"model": model, "optimizer": optimizer, "guard": guard, "random": rng_state()}
    torch.manual_seed(run.rank)
    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
    print("ENTERS", run.rank, start, dict(guard.counts), flush=True)
    tries = 0

    def forward_backward(batch):
        nonlocal tries
        tries += 1
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean()
        first = step == FIRST and "first" in kind and tries == 1 and run.rank == 2
        second = step == SECOND and "second" in kind and run.rank == 1 and (tries == 1 or "deterministic" in kind)
        if "deterministic" in kind and step == SECOND:
            second = float(batch["x"][0, 0]) == 7.0
        persistent = step == SECOND and "persistent" in kind and run.rank == 1 and run.restart_count < 2
        if first or second or persistent:
            loss = loss * (1e4 if first or "deterministic" in kind else float("nan"))
        if step == SECOND and "in the judging" in kind and tries == 2 and run.rank == 0 and run.restart_count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        return loss

    for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=10):
        tries = 0
        x = torch.randn(4, 64)
        if step == SECOND and run.rank == 2:
            x[0, 0] = 7.0
        if step == KILLED and "killed" in kind and run.restart_count == 0:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        guard.compute(step, forward_backward, {"x": x, "number": step})
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        time.sleep(0.03)
    sums = [float(one.detach().double().sum()) for one in model.parameters()]
    print("END", run.rank, float(torch.rand(1)), *sums, dict(guard.counts), flush=True)

main()
"""
for _name in ("STEPS", "FIRST", "KILLED", "SECOND"):
    SCRIPT = SCRIPT.replace(_name, str(globals()[_name]))


class Outcome:
    """What the ranks printed, and what the ledger holds of it."""

    def __init__(self, folder: Path, kind: str, where: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        argv = ["--run-dir", "run", "--nproc-per-node", "3", "train.py", kind, where]
        done = subprocess.run(
            [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
            cwd=folder, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        self._lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
        self._events = list(read_ledger(folder / "run" / "ledger"))

    def said(self, word: str) -> list[str]:
        return sorted(line.removeprefix(word + " ") for line in self._lines if line.startswith(word + " "))

    @property
    def ends(self) -> list[str]:
        """What ranks had at the end, without the counts."""
        return [end.partition("{")[0] for end in self.said("END")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self._events if event.kind == kind]

    @property
    def kept(self) -> list[int]:
        """How many processes lived on, by round."""
        return [event["kept"] for event in self.events("ranks")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What ranks have at the end of a run without a fault."""
    found = Outcome(tmp_path_factory.mktemp("plain"), "plain", "inside")
    assert found.events("result_judged") == []
    return found.ends


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_killed_rank_is_no_alarm_and_what_was_counted_stays(tmp_path: Path, plain: list[str], where: str) -> None:
    found = Outcome(tmp_path, "first, killed", where)
    assert found.kept == [0, 2]
    (judged,) = found.events("result_judged")
    assert (judged["verdict"], judged["rank"], judged["step"]) == ("transient", 2, FIRST)
    assert [line for line in found.said("ENTERS") if f" {KILLED} " in line] == [
        f"{rank} {KILLED} {{'transient': 1}}" for rank in range(3)
    ]
    assert found.ends == plain
    assert all("{'transient': 1}" in end for end in found.said("END"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(("kind", "rank"), [("transient", 1), ("deterministic", 2)])
def test_a_fault_after_the_entry_is_judged_right(
    tmp_path: Path, plain: list[str], kind: str, rank: int, where: str
) -> None:
    found = Outcome(tmp_path, f"killed, second, {kind}", where)
    assert found.kept == [0, 2]
    (judged,) = found.events("result_judged")
    assert (judged["verdict"], judged["rank"], judged["step"]) == (kind, rank, SECOND)
    if kind == "transient":
        assert found.ends == plain
    else:
        assert judged["samples"] == f"{SECOND} of rank 2"


@pytest.mark.slow
def test_a_faulty_device_after_the_entry_is_named_and_no_step_is_lost(tmp_path: Path, plain: list[str]) -> None:
    found = Outcome(tmp_path, "killed, persistent", "outside")
    (judged,) = found.events("result_judged")
    assert (judged["verdict"], judged["rank"], judged["step"]) == ("persistent", 1, SECOND)
    assert [event["restored"] for event in found.events("first_step")] == [-1, KILLED, SECOND]
    assert found.ends == plain


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_step_is_judged_changes_nothing(tmp_path: Path, plain: list[str]) -> None:
    found = Outcome(tmp_path, "killed, second, transient, in the judging", "outside")
    assert len(found.kept) == 3
    assert [event["restored"] for event in found.events("first_step")] == [-1, KILLED, SECOND]
    assert {one["verdict"] for one in found.events("result_judged")} == {"transient"}
    assert found.ends == plain
