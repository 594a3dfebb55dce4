"""Ranks that train with planted corruption: what ``silent_corruption.py`` starts.

Each trial is a line that rank 0 writes to ``--out``: what was planted, and what the ranks know of it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.core.errors import SuspectResult
from resilio_hpc.train.validation.digest_plan import folded, plan_of

TARGETS = ("parameter", "optimizer state", "gradient, after the sum", "gradient, before the sum")
SHAPES = ("one bit", "period", "NaN")
FAULTS = ("NaN in the loss", "Inf in the loss", "loss times 10^4", "gradient times 10^6", "NaN in a gradient")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["replicas", "steps", "bits"], required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--within", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def model_of(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU(), torch.nn.Linear(width, 8)]
    return torch.nn.Sequential(*layers)


def flip(tensor: torch.Tensor, shape: str, draw: random.Random) -> dict[str, Any]:
    """Corrupt a tensor in place; return what was done."""
    words = tensor.detach().view(-1).view(torch.int32)
    at, bit = draw.randrange(words.numel()), draw.randrange(32)
    mask = -(1 << 31) if bit == 31 else 1 << bit
    if shape == "one bit":
        words[at] ^= mask
    elif shape == "period":
        period = draw.choice([2, 4, 16, 64, 256])
        words[at % period :: period] ^= mask
        return {"bit": bit, "period": period}
    else:
        tensor.detach().view(-1)[at] = math.nan
    return {"element": at, "bit": bit if shape == "one bit" else -1}


def sum_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def heal(state: dict[str, Any], world: int, bad: int) -> None:
    """All ranks take parameters and optimizer state of a rank that is right, and drop what is not finite."""
    tensors = [*state["model"].parameters()]
    for values in state["optimizer"].state.values():
        tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), (bad + 1) % world)


def replicas(run: train.Run, options: argparse.Namespace) -> None:
    """Flip bits in one replica, and let the controller find them."""
    model = model_of(128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    saver = Checkpointer(layout=REPLICATED).saver(state)
    period = 4 * options.within  # of a trial: one interval of peace, the fault, two to find it, one to heal
    trial: dict[str, Any] = {}
    clean = {name: value.clone() for name, value in model.state_dict().items()}
    for step in run.steps(0, period * options.trials, save=saver, compare_within=options.within):
        number, phase = divmod(step, period)
        if phase == 0:
            draw = random.Random(f"{options.seed}.{number}")
            trial = {
                "trial": number, "rank": draw.randrange(run.world_size), "target": TARGETS[number % 4],
                "shape": SHAPES[number // 4 % 3], "at": options.within + draw.randrange(options.within),
            }  # fmt: skip
        strikes = phase == trial["at"] and run.rank == trial["rank"]
        named = list(model.named_parameters())
        name, parameter = named[random.Random(f"{options.seed}.{number}.t").randrange(len(named))]
        optimizer.zero_grad()
        draws = torch.Generator().manual_seed(step * 64 + run.rank)
        model(torch.randn(8, 128, generator=draws)).square().mean().backward()
        if strikes and trial["target"] == TARGETS[3]:
            trial |= flip(parameter.grad, trial["shape"], draw)
        sum_gradients(model)
        if strikes and trial["target"] == TARGETS[2]:
            trial |= flip(parameter.grad, trial["shape"], draw)
        optimizer.step()
        if strikes and trial["target"] == TARGETS[0]:
            trial |= flip(parameter, trial["shape"], draw)
        if strikes and trial["target"] == TARGETS[1]:
            trial |= flip(optimizer.state[parameter]["exp_avg"], trial["shape"], draw)
        if phase == trial["at"]:
            trial |= {"tensor": name, "step": step + 1, "differ": differ(state, run.world_size)}
        if phase == trial["at"] + 1:
            trial["differ_after"] = differ(state, run.world_size)
        if phase == 3 * options.within + 1:  # heal: the next trial begins with replicas that are equal
            trial["differ_end"] = differ(state, run.world_size)
            if trial["target"] == TARGETS[3] or trial["shape"] == "NaN":  # all of them have it
                with torch.no_grad():
                    for key, value in model.state_dict().items():
                        value.copy_(clean[key])
                for values in optimizer.state.values():
                    for value in values.values():
                        value.zero_()
            heal(state, run.world_size, trial["rank"])
            write(options.out, trial, run.rank)


def differ(state: dict[str, Any], world: int) -> int:
    """Return how many ranks do not have what most have."""
    plan = plan_of(state, 1)
    mine = torch.tensor([folded([plan.digest(0)])[0] >> 1], dtype=torch.int64)
    found = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(found, mine)
    values = [int(one) for one in found]
    return world - max(map(values.count, values))


def steps(run: train.Run, options: argparse.Namespace) -> None:
    """Plant transient, persistent, and deterministic faults and corrupt parameters; the guard tells them apart."""
    model: torch.nn.Module = model_of(64)
    if options.seed % 2:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[Any] = []
    guard = train.StepGuard(run, model, [optimizer], on_deterministic="go on")
    guard._tell = lambda judgement, about=-1: found.append(judgement)  # type: ignore[method-assign]
    kinds = ("transient", "persistent", "deterministic", "corrupt")
    trial: dict[str, Any] = {}
    computed = 0

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += 1
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        hit = trial and (
            (trial["kind"] == "transient" and run.rank == trial["rank"] and computed == 1)
            or (trial["kind"] == "persistent" and run.rank == trial["rank"])
            or (trial["kind"] == "deterministic" and float(batch[0, 0]) == 123.0)
        )
        fault = trial["fault"] if hit else ""
        factor = {"NaN in the loss": math.nan, "Inf in the loss": math.inf, "loss times 10^4": 1e4}.get(fault, 1.0)
        handle = None
        if "gradient" in fault:
            change = 1e6 if "10^6" in fault else math.nan
            weight = next(model.parameters())
            handle = weight.register_hook(lambda grad: grad * change)
        (loss * factor).backward()
        if handle is not None:
            handle.remove()
        return loss * factor

    for step in range(40 + 10 * options.trials):
        computed, number = 0, (step - 40) // 10
        trial = {}
        draws = torch.Generator().manual_seed(step * 64 + run.rank)
        batch = torch.randn(8, 64, generator=draws)
        if step >= 40 and step % 10 == 5:
            draw = random.Random(f"{options.seed}.{number}")
            trial = {
                "kind": kinds[number % 4], "fault": FAULTS[number // 4 % len(FAULTS)], "step": step,
                "rank": draw.randrange(run.world_size), "ddp": options.seed % 2 == 1,
            }  # fmt: skip
            if trial["kind"] == "deterministic" and run.rank == trial["rank"]:
                batch[0, 0] = 123.0
            if trial["kind"] == "corrupt":
                trial["fault"] = ("NaN in a parameter", "10^30 in a parameter")[number // 4 % 2]
                tensor = draw.choice([one for one in model.parameters() if one.dim() > 1])
                place = draw.randrange(tensor.numel())
                whole = tensor.detach().clone()
                if run.rank == trial["rank"]:
                    tensor.detach().view(-1)[place] = math.nan if "NaN" in trial["fault"] else 1e30
        before = len(found)
        try:
            guard.compute(step, forward_backward, batch)
        except SuspectResult as error:
            assert "silent corruption" in str(error)
        if trial:
            told: list[Any] = [None] * run.world_size
            mine = [(one.verdict, one.rank, one.tries) for one in found[before:]]
            dist.all_gather_object(told, mine)
            trial["differ"] = differ({"model": model, "optimizer": optimizer}, run.world_size)
            if trial["differ"]:  # not noticed: the next trial begins without it
                tensor.detach().copy_(whole)
            trial["said"] = next((list(one[0]) for one in told if one), [])
            write(options.out, trial, run.rank)
            continue  # the trial's gradients are not used
        if not options.seed % 2:
            sum_gradients(model)
        optimizer.step()


def bits(run: train.Run, options: argparse.Namespace) -> None:
    """Flip one bit of one rank's gradient before the sum: which bits the guard notices."""
    model = model_of(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = train.StepGuard(run, model)
    parameters = list(model.parameters())
    draw = random.Random(options.seed)
    plan: tuple[int, int, int, int] | None = None

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        nonlocal plan
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if plan is not None and run.rank == plan[0]:
            words = parameters[plan[1]].grad.view(-1).view(torch.int32)
            words[plan[2] % words.numel()] ^= -(1 << 31) if plan[3] == 31 else 1 << plan[3]
        plan = None
        return loss

    for step in range(40 + 2 * options.trials):
        draws = torch.Generator().manual_seed(step * 64 + run.rank)
        planted = step >= 40 and step % 2 == 1
        if planted:
            plan = (draw.randrange(run.world_size), draw.randrange(len(parameters)), draw.randrange(1 << 20),
                    step // 2 % 32)  # fmt: skip
        bit = plan[3] if plan is not None else -1
        before = guard.counts.get("transient", 0)
        guard.compute(step, forward_backward, torch.randn(8, 64, generator=draws))
        if planted:
            write(options.out, {"bit": bit, "noticed": guard.counts.get("transient", 0) > before}, run.rank)
        sum_gradients(model)
        optimizer.step()


def write(out: Path, trial: dict[str, Any], rank: int) -> None:
    """Rank 0 writes a trial; what the struck rank alone knows is asked of it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, trial)
    if rank == 0:
        whole = {**trial, **found[trial.get("rank", 0)]}
        with out.open("a") as file:
            file.write(json.dumps({**whole, "time": int(time.time())}) + "\n")


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    run = train.attach()
    dist.init_process_group("gloo")
    if options.part == "replicas":
        replicas(run, options)
        return
    (steps if options.part == "steps" else bits)(run, options)
    run.finish(0)


if __name__ == "__main__":
    main()
