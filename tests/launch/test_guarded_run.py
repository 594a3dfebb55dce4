"""Under the real launcher: a suspect step is computed again, and training ends as without a fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

STEPS, STRUCK = 30, 25
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state

kind, size = sys.argv[1].split(",")
run = train.attach()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))
if "ddp" in kind:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
checkpoint = Checkpointer(layout=REPLICATED)
samples = lambda batch: f"{batch['number']} of rank {run.rank}"
guard = train.StepGuard(run, model, [optimizer], samples=samples, sample_every=10 if "sampled" in kind else 0)
state = lambda: {"model": model, "optimizer": optimizer, "guard": guard, "random": rng_state()}
torch.manual_seed(run.rank)
start, found = checkpoint.restore(state()) or (0, None)
if found is not None:
    set_rng_state(found["random"])
tries = 0

def forward_backward(batch):
    global tries
    tries += 1
    optimizer.zero_grad()
    loss = model(batch["x"]).square().mean()
    if step == STRUCK:
        transient = "transient" in kind and run.rank == 1 and tries == 1
        persistent = "persistent" in kind and run.rank == 1 and run.restart_count == 0
        deterministic = "deterministic" in kind and float(batch["x"][0, 0]) == 7.0
        if transient or persistent or deterministic:
            loss = loss * (float("nan") if size == "nan" else 1e4)
        if "killed" in kind and tries == 3 and run.rank == 1 and run.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    return loss

for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=10):
    tries = 0
    x = torch.randn(4, 64)
    if step == STRUCK and run.rank == 2:
        x[0, 0] = 7.0
    if "corrupt" in kind and step == STRUCK and run.rank == 1:
        model[0].weight.data[3, 5] = float("nan") if size == "nan" else 3e38
        optimizer.state[model[2].bias]["exp_avg_sq"][1] = 7.0
    guard.compute(step, forward_backward, {"x": x, "number": step})
    if "ddp" not in kind:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
sums = [float(one.detach().double().sum()) for one in model.parameters()]
print("END", run.rank, float(torch.rand(1)), *sums, dict(guard.counts), flush=True)
""".replace("STEPS", str(STEPS)).replace("STRUCK", str(STRUCK))


def launch(path: Path, kind: str) -> tuple[int, list[str], list[dict[str, Any]], set[str]]:
    """Return the exit code, what ranks had at the end, the verdicts, and the kinds of events."""
    path.mkdir(exist_ok=True)
    (path / "train.py").write_text(SCRIPT)
    argv = ["--run-dir", "run", "--nproc-per-node", "3", "train.py", kind]
    done = subprocess.run(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
        cwd=path, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    ends = sorted(line.partition("END ")[2] for line in done.stdout.splitlines() if "END " in line)
    events = list(read_ledger(path / "run" / "ledger"))
    judged = [event.fields for event in events if event.kind in ("result_judged", "noise_measured")]
    return done.returncode, ends, judged, {event.kind for event in events}


def without_counts(ends: list[str]) -> list[str]:
    return [end.partition("{")[0] for end in ends]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What ranks have at the end of a run without a fault."""
    code, ends, judged, _ = launch(tmp_path_factory.mktemp("plain"), "plain,nan")
    assert (code, judged) == (0, [])
    return without_counts(ends)


@pytest.mark.slow
def test_a_transient_fault_costs_one_computation(tmp_path: Path, plain: list[str]) -> None:
    code, ends, (found,), _ = launch(tmp_path, "transient,nan")
    assert (code, without_counts(ends)) == (0, plain)
    assert (found["verdict"], found["rank"], found["tries"], found["step"]) == ("transient", 1, 2, STRUCK)
    assert all("'transient': 1" in end for end in ends)


@pytest.mark.slow
def test_a_faulty_device_is_left_and_no_step_is_lost(tmp_path: Path, plain: list[str]) -> None:
    code, ends, (found,), _ = launch(tmp_path, "persistent,nan")
    assert (code, without_counts(ends)) == (0, plain)
    assert (found["verdict"], found["rank"], found["said_by"]) == ("persistent", 1, 0)
    events = {event.kind: event.fields for event in read_ledger(tmp_path / "run" / "ledger")}
    assert (events["rank_failed"]["rank"], events["rank_failed"]["class"]) == (1, "gpu_hardware")
    assert events["first_step"]["restored"] == STRUCK
    assert events["recovered"]["lost_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["persistent ddp,1e4", "deterministic ddp,1e4", "transient ddp,1e4"])
def test_the_sums_of_ddp_do_not_hide_whose_fault_it_is(tmp_path: Path, kind: str) -> None:
    code, _, (found,), _ = launch(tmp_path, kind)
    wanted = kind.split()[0]
    assert (code, found["verdict"], found["rank"]) == (0, wanted, 2 if wanted == "deterministic" else 1)
    assert found["signal"].startswith("gradient norm is ")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["nan", "1e4"])
def test_corrupt_parameters_are_copied_from_another_replica(tmp_path: Path, plain: list[str], size: str) -> None:
    code, ends, (found,), kinds = launch(tmp_path, f"corrupt,{size}")
    assert (code, without_counts(ends)) == (0, plain)
    assert (found["verdict"], found["rank"], found["module"]) == ("corrupt", 1, "0.weight")
    assert "rank_failed" not in kinds


@pytest.mark.slow
def test_a_result_that_comes_again_elsewhere_is_reported_with_its_samples(tmp_path: Path) -> None:
    code, ends, (found,), _ = launch(tmp_path, "deterministic,1e4")
    assert (code, found["verdict"], found["rank"], found["samples"]) == (0, "deterministic", 2, "25 of rank 2")
    assert len({end.split("{")[0].split()[2] for end in ends}) == 1  # all go on, with the same weights


@pytest.mark.slow
def test_a_nan_that_comes_again_elsewhere_ends_the_run(tmp_path: Path) -> None:
    code, _, judged, kinds = launch(tmp_path, "deterministic,nan")
    assert code == 1
    assert {(one["verdict"], one["rank"], one["step"]) for one in judged} == {("deterministic", 2, STRUCK)}
    assert "verdict" in kinds


def test_a_rank_that_is_killed_in_the_midst_of_it_changes_nothing(tmp_path: Path) -> None:
    code, ends, judged, _ = launch(tmp_path, "deterministic killed,1e4")
    assert code == 0
    assert [(one["verdict"], one["rank"]) for one in judged] == [("deterministic", 2)]
    assert all("{'deterministic': 1}" in end for end in ends)
    assert len({end.split("{")[0].split()[2] for end in ends}) == 1


@pytest.mark.slow
def test_sampled_steps_report_how_much_results_differ_and_change_nothing(tmp_path: Path, plain: list[str]) -> None:
    code, ends, judged, _ = launch(tmp_path, "sampled,nan")
    assert (code, without_counts(ends)) == (0, plain)
    assert [(one["step"], one["difference"], one["peer_difference"]) for one in judged] == [
        (0, 0.0, 0.0), (10, 0.0, 0.0), (20, 0.0, 0.0),
    ]  # fmt: skip
