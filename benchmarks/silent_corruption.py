"""Whether silent corruption is found, blamed, and classified, and what the comparison of replicas costs.

    python benchmarks/silent_corruption.py --results benchmarks/silent_corruption.jsonl
    python benchmarks/silent_corruption.py --results benchmarks/silent_corruption.jsonl --only table

*replicas*: bits of one of the ranks' parameters, optimizer states, and gradients are flipped under the real launcher
(one bit, a period of words, NaN; all drawn). *steps*: transient, persistent, and deterministic faults and corrupt
parameters, which a ``StepGuard`` tells apart. *bits*: which single bits of a gradient it notices. *cost*: a step with
and without the digests, in pairs of ABBA blocks, at the default interval. Each trial is a line of --results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from resilio_hpc.core.ledger import read_ledger

SCRIPT = Path(__file__).with_name("corrupted_training.py")
LIMIT_S = 900.0


def launched(part: str, trials: int, seed: int, ranks: int, within: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Run the training; return its trials and the ledger's events."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        argv = [
            *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-environment-check"),
            *("--nproc-per-node", str(ranks), str(SCRIPT), "--part", part, "--trials", str(trials)),
            *("--seed", str(seed), "--within", str(within), "--out", str(path / "trials")),
        ]  # fmt: skip
        done = subprocess.run(
            argv, cwd=path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode != 0:
            raise SystemExit(done.stderr[-3000:])
        lines = [json.loads(line) for line in (path / "trials").read_text().splitlines()]
        return lines, list(read_ledger(path / "run" / "ledger"))


def unlaunched(part: str, trials: int, seed: int, ranks: int) -> list[dict[str, Any]]:
    """Run the training by torchrun: a rank with a persistent fault is to stay."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "trials"
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(SCRIPT), "--part", part, "--trials", str(trials), "--seed", str(seed), "--out", str(out)),
        ]  # fmt: skip
        done = subprocess.run(
            argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode != 0:
            raise SystemExit(done.stderr[-3000:])
        return [json.loads(line) for line in out.read_text().splitlines()]


def replicas(trials: int, seed: int, ranks: int, within: int) -> list[dict[str, Any]]:
    """Return the trials with what the controller found."""
    lines, events = launched("replicas", trials, seed, ranks, within)
    found = [event.fields for event in events if event.kind == "digests_differ"]
    for line in lines:
        begin = line["step"]
        mine = [one for one in found if begin <= one["step"] <= begin + 2 * within]
        first = mine[0] if mine else None
        line |= {
            "part": "replicas", "found": first is not None, "ranks": ranks, "within": within,
            "blamed": first is not None and first["ranks"] == [line["rank"]] and first["certain"],
            "known_after": None if first is None else first["step"] + first["parts"] - 1 - first["part"] - begin,
            "named": first is not None and bool(first["tensor"]),
        }  # fmt: skip
    others = len(found) - sum(line["found"] for line in lines)
    return [*lines, {"part": "replicas alarms", "false": max(0, others), "ranks": ranks}]


def cost(pairs: int) -> dict[str, Any]:
    """Measure steps with and without digests of one process, in turns of ABBA and BAAB; and what the digests take.

    In processor time of one thread. Other work on the machine still slows it, for seconds, so turns are single steps.
    The control compares the outer and inner two of four steps that all have no digests: what it differs from 0 by
    is not the digests'.
    """
    import torch

    from resilio_hpc.train.validation.replica_digests import DEFAULT_STEPS, ReplicaSweep

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 128, 128)  # 1024 tokens
    sent: list[Any] = []
    state = {"model": model, "optimizer": optimizer}
    sweep = ReplicaSweep(lambda: state, "g", 3, sent.append)
    completed = 0

    def step(with_digests: bool) -> tuple[float, float]:
        nonlocal completed
        spent, began = 0.0, time.thread_time()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if with_digests:
            completed += 1
            at = time.thread_time()
            sweep.at_boundary(completed)
            spent = time.thread_time() - at
        return time.thread_time() - began, spent

    for _ in range(10):
        step(True)
    ratios, shares, without, control = [], [], [], []
    for _ in range(pairs):
        (a1, s1), (b1, _), (b2, _), (a2, s2) = step(True), step(False), step(False), step(True)
        (b3, _), (a3, s3), (a4, s4), (b4, _) = step(False), step(True), step(True), step(False)
        c1, c2, c3, c4 = [step(False)[0] for _ in range(4)]
        with_digests, took = a1 + a2 + a3 + a4, s1 + s2 + s3 + s4
        ratios.append(round(with_digests / (b1 + b2 + b3 + b4) - 1.0, 6))
        shares.append(round(took / (with_digests - took), 6))
        control.append(round((c1 + c4) / (c2 + c3) - 1.0, 6))
        without.append((b1 + b2 + b3 + b4) / 4)
    return {
        "part": "cost of turns", "ratios": ratios, "shares": shares, "control": control, "within": DEFAULT_STEPS,
        "step_ms": statistics.median(without) * 1e3,
        "megabytes": sum(piece.stop - piece.start for part in _parts(state) for piece in part) / 1e6,
    }  # fmt: skip


def _parts(state: Any) -> Any:
    from resilio_hpc.train.validation.digest_plan import plan_of

    return plan_of(state, 50).parts


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def tables(lines: list[dict[str, Any]]) -> None:
    """Print what was found."""
    console = Console(width=150)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["part"] == "replicas":
            groups[line["target"], line["shape"]].append(line)
    table = Table(
        "corrupted", "shape", "trials", "found", "blamed", "equal at once", "equal a step later",
        "equal two intervals later", "missed",
        "steps until known (most)",
    )  # fmt: skip
    for (target, shape), trials in sorted(groups.items()):
        at_once = [one for one in trials if not one["found"] and not one["differ"]]
        later = [one for one in trials if not one["found"] and one["differ"] and not one.get("differ_after")]
        left = [one for one in trials if not one["found"] and one not in at_once and one not in later]
        undone = sum(not one["differ_end"] for one in left)
        after = [one["known_after"] for one in trials if one["known_after"] is not None]
        counts = len(trials), sum(one["found"] for one in trials), sum(one["blamed"] for one in trials)
        numbers = *counts, len(at_once), len(later), undone, len(left) - undone
        table.add_row(target, shape, *map(str, numbers), str(max(after, default="")))
    console.print(table)
    console.print(f"false alarms: {sum(one.get('false', 0) for one in lines)}")
    verdicts: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["part"] == "steps":
            verdicts[line["kind"], line["ddp"]].append(line)
    table = Table("fault", "DDP", "trials", "right verdict", "right rank", "replicas equal then", "said instead")
    for (kind, ddp), trials in sorted(verdicts.items()):
        right = [one for one in trials if one["said"] and one["said"][0] == kind]
        rank = [one for one in right if one["said"][1] == one["rank"]]
        wrong = Counter(one["said"][0] if one["said"] else "nothing" for one in trials if one not in right)
        numbers = len(trials), len(right), len(rank), sum(not one["differ"] for one in trials)
        table.add_row(kind, str(ddp), *map(str, numbers), str(dict(wrong) or ""))
    console.print(table)
    noticed: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        if line["part"] == "bits":
            bit = line["bit"]
            name = (
                "sign"
                if bit == 31
                else f"exponent {bit}"
                if bit >= 27
                else "exponent 23-26"
                if bit > 22
                else "mantissa"
            )
            noticed[name].append(line["noticed"])
    console.print({name: f"{sum(values)}/{len(values)}" for name, values in sorted(noticed.items())})
    costs = [line for line in lines if line["part"] == "cost of turns"]
    if costs:
        for name in ("ratios", "control", "shares"):
            values = [value for line in costs for value in line[name]]
            low, high = interval(values)
            console.print(f"cost, {name}: {statistics.median(values):+.3%} (95 %: {low:+.3%} … {high:+.3%})", end="; ")
        step_ms = statistics.median(one["step_ms"] for one in costs)
        console.print(f"{len(values)} turns of ABBA and BAAB, step {step_ms:.0f} ms, {costs[0]['megabytes']:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", choices=["replicas", "steps", "bits", "cost", "table"])
    parser.add_argument("--trials", type=int, default=240)
    parser.add_argument("--pairs", type=int, default=500, help="turns of ABBA and BAAB, of single steps")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    new: list[dict[str, Any]] = []
    if options.only in (None, "replicas"):
        new += replicas(options.trials, options.seed, options.ranks, 20)
    if options.only in (None, "steps"):
        for seed in (0, 1):  # without and with DDP
            lines = unlaunched("steps", options.trials, 2 * options.seed + seed, options.ranks)
            new += [{"part": "steps", **line} for line in lines]
    if options.only in (None, "bits"):
        new += [{"part": "bits", **line} for line in unlaunched("bits", 320, options.seed, options.ranks)]
    if options.only in (None, "cost"):
        new.append(cost(options.pairs))
    with options.results.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in new)
    tables([json.loads(line) for line in options.results.read_text().splitlines()])


if __name__ == "__main__":
    main()
