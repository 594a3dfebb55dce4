"""Under the real launcher: ranks that live enter the next round in their processes, and only the others start again.

Ranks train as DDP does. Each step's sum over the weights is printed by rank 0: no step comes twice, and the end is
that of an undisturbed run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.agent.kept_ranks import LEAVE_S
from tests.support.environments import scrubbed
from tests.support.launch.own_generators import drawn_after
from tests.support.waiting import PATIENCE_S

STEPS, STRUCK = 9, 5
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state

WHERE = sys.argv[1]
run = train.attach()
print("BORN", run.rank if "standby" not in WHERE else os.environ["RANK"], os.getpid(), flush=True)

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), Checkpointer(layout=REPLICATED)

kept = make() if "outside" in WHERE else None

def strike(where, step):
    if where == WHERE.partition(",")[0] and step == STRUCK and run.rank == 1 and run.restart_count == 0:
        if where == "raises":
            raise ValueError("planted")
        if where == "device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        os.kill(os.getpid(), signal.SIGSTOP if where == "stopped" else signal.SIGKILL)

if "not woken" in WHERE:
    from resilio_hpc.core import gloo_groups
    from resilio_hpc.train import broken_communication
    broken_communication.break_all, gloo_groups.free = lambda environment: None, lambda: 0

@train.restartable
def main():
    if "while it recovers" in WHERE and run.restart_count == 1 and run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")
    model, optimizer, checkpoint = kept or make()
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(run.rank)
    state = lambda: {"model": model, "optimizer": optimizer, "random": rng_state()}
    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
    print("ENTERS", run.rank, run.round, start, os.getpid(), flush=True)
    hook = optimizer.register_step_post_hook(lambda *_: strike("in the optimizer", step))
    for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=100):
        optimizer.zero_grad()
        for where in ("killed", "raises", "stopped", "device"):
            strike(where, step)
        if "standby waits" in WHERE and step == STRUCK - 1 and run.restart_count == 0:
            while not any("standby_ready" in path.read_text() for path in (run.run_dir / "ledger").glob("*")):
                time.sleep(0.02)
        if WHERE == "asleep" and step == STRUCK and run.restart_count == 0:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        if WHERE == "deaf" and step == STRUCK and run.restart_count == 0:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                try:
                    time.sleep(1000)
                except BaseException:
                    print("DEAF", flush=True)
        if "not woken" in WHERE:
            dist.all_reduce(torch.zeros(1))
        parallel(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.03)
        if run.rank == 0:
            print("STEP", step, float(model[0].weight.detach().sum()), flush=True)
    hook.remove()
    print("END", run.rank, float(torch.rand(1)), float(model[0].weight.detach().sum()), flush=True)
    dist.destroy_process_group()

main()
""".replace("STRUCK", str(STRUCK)).replace("STEPS", str(STEPS))


class Outcome:
    """What the ranks printed, and what the ledger holds of it."""

    def __init__(self, folder: Path, where: str, *options: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        argv = ["--run-dir", "run", "--nproc-per-node", "2", "--hang-timeout", "3", *options, "train.py", where]
        done = subprocess.run(
            [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
            cwd=folder, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        self._lines = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
        self._events = list(read_ledger(folder / "run" / "ledger"))

    def said(self, word: str) -> list[list[str]]:
        return [line[1:] for line in self._lines if line[:1] == [word]]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self._events if event.kind == kind]

    def processes(self) -> dict[int, list[str]]:
        """By rank: its processes, one for each round that it entered."""
        return {rank: [line[3] for line in self.said("ENTERS") if line[0] == str(rank)] for rank in range(2)}

    def check(self) -> None:
        """Each step was done once, and the ranks ended with the same weights and their own generators."""
        assert [int(line[0]) for line in self.said("STEP")] == list(range(STEPS))
        ends = {int(line[0]): (float(line[1]), line[2]) for line in self.said("END")}
        assert {rank: end[0] for rank, end in ends.items()} == {
            rank: pytest.approx(drawn_after(rank, STEPS)) for rank in range(2)
        }
        assert len({weights for _, weights in ends.values()}) == 1


@pytest.mark.parametrize(
    "where",
    [
        "killed",
        pytest.param("killed, state outside", marks=pytest.mark.slow),
        pytest.param("in the optimizer", marks=pytest.mark.slow),
        pytest.param("in the optimizer, state outside", marks=pytest.mark.slow),
        pytest.param("asleep", marks=pytest.mark.slow),
        pytest.param("stopped", marks=pytest.mark.slow),
        pytest.param("device", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_lives_goes_on_in_its_process(tmp_path: Path, where: str) -> None:
    done = Outcome(tmp_path, where)
    done.check()
    processes = done.processes()
    assert len(processes[0]) == 2 and len(set(processes[0])) == 1, "it entered twice in one process"
    assert len(set(processes[1])) == 2
    assert [line[2] for line in done.said("ENTERS")][2:] == [str(STRUCK + ("optimizer" in where))] * 2
    (left,) = done.events("ranks_left")
    assert (left["kept"], left["of"], left["others"]) == (1, 2, [1] if where == "stopped" else [])
    assert [event["kept"] for event in done.events("ranks")] == [0, 1]


def test_a_standby_process_takes_the_place_of_the_rank_that_is_killed(tmp_path: Path) -> None:
    done = Outcome(tmp_path, "killed, state outside, standby waits", "--spare-ranks", "1")
    done.check()
    (used,) = done.events("standby_used")
    assert used["rank"] == 1
    assert done.processes()[1][1] == str(used["pid"])
    assert used["pid"] == done.events("standby_ready")[0]["pid"]
    assert done.said("BORN") and {rank for rank, _ in done.said("BORN")} == {"0", "1"}, "no rank was started again"
    assert [event["kept"] for event in done.events("ranks")] == [0, 2]


@pytest.mark.slow
def test_a_script_that_needs_its_rank_too_early_runs_without_standby_processes(tmp_path: Path) -> None:
    done = Outcome(tmp_path, "killed, state outside", "--spare-ranks", "2")
    done.check()
    lost = done.events("standby_lost")
    assert lost and all(event["for_good"] for event in lost)
    assert "run.rank: a process of --spare-ranks has no rank before" in lost[0]["reason"]
    assert done.events("standby_used") == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["raises", "raises, state outside"])
def test_a_rank_that_raises_enters_again_as_well(tmp_path: Path, where: str) -> None:
    done = Outcome(tmp_path, where)
    done.check()
    assert all(len(found) == 2 and len(set(found)) == 1 for found in done.processes().values())
    assert len(done.said("BORN")) == 2


@pytest.mark.slow
def test_ranks_that_report_steps_enter_again_under_the_policy_failed_too(tmp_path: Path) -> None:
    done = Outcome(tmp_path, "killed", "--restart-policy", "failed")
    done.check()
    assert len(set(done.processes()[0])) == 1
    assert len(done.events("restarts_all")) == 1


@pytest.mark.slow
def test_a_failure_while_ranks_recover_costs_no_more(tmp_path: Path) -> None:
    done = Outcome(tmp_path, "killed, and while it recovers")
    done.check()
    assert len(done.said("BORN")) == 4
    assert [event["kept"] for event in done.events("ranks")] == [0, 1, 1]


@pytest.mark.slow
def test_a_rank_that_does_not_leave_is_ended_and_started_again(tmp_path: Path) -> None:
    done = Outcome(tmp_path, "deaf")
    done.check()
    assert done.said("DEAF")
    assert all(len(set(found)) == 2 for found in done.processes().values())
    (left,) = done.events("ranks_left")
    assert (left["kept"], left["others"]) == (0, [0])


@pytest.mark.slow
def test_a_rank_that_a_broken_connection_does_not_wake_ends_and_starts_again(tmp_path: Path) -> None:
    """As it was seen of gloo, seldom: a collective whose connections are all shut down does not end."""
    found = Outcome(tmp_path, "raises, not woken")
    assert sorted(rank for rank, _ in found.said("BORN")) == ["0", "0", "1"]
    (left,) = found.events("ranks_left")
    assert (left["kept"], left["of"]) == (1, 2)
    assert left["seconds"] < LEAVE_S  # the agent would have ended it then
    assert [int(words[0]) for words in found.said("STEP")] == list(range(STEPS))


@pytest.mark.slow
def test_by_the_policy_all_ranks_start_again(tmp_path: Path) -> None:
    done = Outcome(tmp_path, "killed", "--restart-policy", "all")
    done.check()
    assert done.events("ranks_left") == []
    assert all(len(set(found)) == 2 for found in done.processes().values())
