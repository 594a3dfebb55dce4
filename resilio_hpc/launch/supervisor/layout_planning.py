"""``--layout auto``: the planner is asked once per job, before anything of the job's part begins.

It runs as ``resilio plan``, in a process of its own, once for each type of GPU of the job's nodes and for all numbers
of nodes that the run may have. So a lost node needs no planning: the layout of what is left is known. The order is
that of the Resilio paper: plan, checkpoint, start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from resilio_hpc.ckpt.store.checkpoint_index import committed, step_directory
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.planned_layouts import AUTO, LayoutPlan, PlannedLayout
from resilio_hpc.launch.config.rank_layout import PLANNED, is_auto, model_parallel
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.process.announce import say

PATIENCE_S = 120.0  # of one call of the planner
LEADER_S, LOOK_S = 150.0, 0.5  # for the leading supervisor's plan, where srun has started one on each node
MOST_ROWS = 192  # they are on the agents' command lines, each 0.3 KB: the kernel takes 128 KB
MOST_BYTES = 80_000  # of their values and reasons, which are longer where they name the parts of pipeline stages
_NAMES = ("tp", "pp", *PLANNED)


class NoPlanError(ResilioError):
    """The planner has no answer."""


Ask = Callable[[Sequence[str]], Mapping[str, Any]]


def planned(options: LaunchOptions, site: Site, run_path: Path, ledger: Ledger) -> LaunchOptions:
    """Return the options with the planner's layouts, where ``--layout auto`` asks for them.

    Where the planner cannot: tensor and pipeline parallel are those of ``--layout``'s rows, or of the run's job before,
    which is said. Raises UsageError where there is neither.
    """
    if not is_auto(options):
        return options
    if not site.leads and (made := _of_the_leader(run_path, site.key)) is not None:
        return replace(options, planning=replace(options.planning, plan=made))
    began = time.monotonic()
    named = any(word == "--gpu" or word.startswith("--gpu=") for word in options.planning.layout_options)
    types = {} if named or site.mode is SiteMode.LOCAL else _types_of(site.nodes)
    before = _before(run_path)
    pinned = checkpoint_pins(newest_division(run_path / "checkpoints"), before)
    plan = plan_layouts(options, site.nodes, types, ask_planner, pinned)
    if plan.standing is None:
        plan = replace(plan, standing=before)
    if plan.failed:
        rows = [row for row in options.layouts if row != AUTO]
        if plan.standing is None and not rows:
            beside = "a --layout tp=N,pp=N beside it is used where it cannot plan"
            raise UsageError(f"--layout auto: {plan.failed} ({beside})")
        kept = plan.standing.degrees if plan.standing is not None else model_parallel(rows, 0)
        say(f"--layout auto: no plan: {plan.failed}; tp={kept[0]} and pp={kept[1]} are kept")
    ledger.append(
        "layouts_planned", asked=options.planning.layout_options, sizes=len({row.ranks for row in plan.rows}),
        gpus=plan.gpus, seconds=round(time.monotonic() - began, 3), failed=plan.failed,
    )  # fmt: skip
    return replace(options, planning=replace(options.planning, plan=plan))


Division = Literal["parts", "copies", "own"]
"""What a checkpoint holds: parts of tensors, whole copies, or tensors of each process's own."""


def _of_the_leader(run_path: Path, key: str) -> LayoutPlan | None:
    """Return the plan that the leading supervisor of this part of the run has made, so that Slurm is asked once.

    None where it does not come.
    """
    deadline = time.monotonic() + LEADER_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ResilioError):
            record = joining.read_record(run_path)
            if record is not None and record.key == key:
                return record.options.planning.plan
        time.sleep(LOOK_S)
    return None


def newest_division(directory: Path) -> Division | None:
    """Return what the step holds that the run goes on from; None without one, or where it cannot be read."""
    with contextlib.suppress(ResilioError, OSError):
        steps = committed(directory)
        if not steps:
            return None
        manifest = steps[-1]
        if manifest.layout == "replicated":
            return "copies"
        shard, rank = manifest.shard_of(0)
        with ShardReader(step_directory(directory, manifest.step), shard) as reader:
            return "parts" if any(tensor.slab for tensor in reader.table(rank).tensors) else "own"
    return None


def checkpoint_pins(division: Division | None, before: PlannedLayout | None) -> tuple[tuple[str, ...], str]:
    """Return the planner's words for what the checkpoint cannot be divided into otherwise, and why; "" for nothing.

    Parts of tensors (Slab, DTensor) go into any layout. Whole copies stay whole. Tensors of one process each have no
    other place, so the layout of the job ``before`` is kept.
    """
    if division == "copies":
        return ("--tp=1", "--pp=1", "--ep=1", "--cp=1"), "the checkpoint holds whole copies: data parallel alone"
    if division != "own" or before is None:
        return (), ""
    values = dict(before.values)
    names = ("tp", "pp", "ep", "etp", "cp", "vpp")
    words = tuple(f"--{name}={values[name]}" for name in names if name in values)
    return words, "the checkpoint holds tensors of each process's own: tensor and pipeline parallel stay"


def plan_layouts(
    options: LaunchOptions,
    nodes: Sequence[str],
    types: Mapping[str, str],
    ask: Ask,
    pinned: tuple[tuple[str, ...], str] = ((), ""),
) -> LayoutPlan:
    """Return the plan for all sizes of the run. ``types``: node → type of GPU, without nodes whose type is not known.

    ``pinned``: words that go before the user's, and why.
    ``failed`` says why a plan has no rows; never raises for what the planner answers.
    """
    words = list(options.planning.layout_options)
    if not any(word == "--cp" or word.startswith("--cp=") for word in words):
        words.append("--cp=1")  # few scripts can divide sequences
    words += pinned[0]  # of an option that is given twice, the last counts
    each = int(options.nproc_per_node)
    common = Counter(types[node] for node in nodes if node in types).most_common(1)
    common_gpu = common[0][0] if common else ""
    gpus = sorted(set(types.values()), key=lambda gpu: gpu != common_gpu) or [""]
    sizes = range(options.min_nodes, options.max_nodes + 1)
    wanted = [n * each for n in sizes if n % options.node_unit == 0][-max(1, MOST_ROWS // len(gpus)) :]
    rows: list[PlannedLayout] = []
    order: dict[str, tuple[float, float]] = {}  # by memory, and of the same memory the slower one first
    failed = ""
    batch = 0
    for gpu in gpus:
        call = [*words, f"--per-node={each}", f"--gpus={wanted[0]}-{wanted[-1]}", "--json"] if wanted else words
        try:
            answer = ask([*call, *([f"--gpu={gpu}"] if gpu else [])])
            choices = answer["choices"]
            found = {int(one["gpus"]): _row(one, gpu, pinned[1]) for one in choices}
            batch = int(answer["global_batch"])
            order[gpu] = min((float(x["gpu_bytes"]), -float(x["iteration_s"]) * int(x["gpus"])) for x in choices)
        except NoPlanError as error:
            failed = failed or str(error)
            continue
        except (KeyError, TypeError, ValueError):
            failed = failed or "the planner's answer is not understood"
            continue
        rows += _short([found[ranks] for ranks in wanted if ranks in found], MOST_BYTES // len(gpus))
    largest = max((row for row in rows if row.gpu == common_gpu), key=lambda row: row.ranks, default=None)
    return LayoutPlan(
        rows=tuple(rows), gpus=tuple(sorted(order, key=lambda gpu: order[gpu])),
        gpu_of=tuple((node, types[node]) for node in nodes if types.get(node, common_gpu) != common_gpu),
        common_gpu=common_gpu, global_batch=batch, standing=largest or max(rows, key=lambda r: r.ranks, default=None),
        failed="" if rows else failed or "no layout fits any size of this run",
    )  # fmt: skip


def _short(rows: Sequence[PlannedLayout], most_bytes: int) -> list[PlannedLayout]:
    """Return the largest sizes whose rows come to so many bytes; for the others, what stands holds."""
    kept: list[PlannedLayout] = []
    for row in reversed(rows):
        most_bytes -= len(row.why) + sum(len(name) + len(value) + 8 for name, value in row.values)
        if most_bytes < 0:
            break
        kept.insert(0, row)
    return kept


def _row(choice: Mapping[str, Any], gpu: str, pinned: str) -> PlannedLayout:
    """Return the row of one of the planner's choices."""
    said = choice["environment"].items()
    variables = {str(name).removeprefix("RESILIO_").lower(): str(value) for name, value in said}
    values = tuple((name, variables[name]) for name in _NAMES if name in variables)
    shape = f"{int(choice['nodes'])} x {int(choice['gpus_per_node'])} {choice['gpu']}"
    why = (
        f"planned for {shape}: {choice['layout']}, {float(choice['iteration_s']):.3g} s a step, "
        f"{float(choice['memory_bytes']) / 2**30:.0f} of {float(choice['gpu_bytes']) / 2**30:.0f} GiB"
        f"{'; ' if pinned else ''}{pinned}"
    )
    row = PlannedLayout(int(choice["gpus"]), gpu, values, why)
    tensor, pipeline = row.degrees
    if tensor < 1 or pipeline < 1 or row.ranks % (tensor * pipeline) or row.micro_batch < 1:
        raise ValueError("degrees that do not divide the ranks")
    return row


def ask_planner(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the planner's answer. Raises NoPlanError with its own words."""
    command = [*bootstrap.command("cli.main"), "plan", "search", *words]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            errors="replace", env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoPlanError(f"the planner has not answered within {PATIENCE_S:.0f} s") from None
    except OSError as error:
        raise NoPlanError(f"the planner could not be started: {error.strerror}") from None
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"the planner ended with {ended.returncode}"]
        text = lines[-1].removeprefix("resilio: ").removeprefix("error: ")
        raise NoPlanError(printable(text, 400))
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise NoPlanError("the planner's answer is not understood")
    return answer


def _types_of(nodes: Sequence[str]) -> dict[str, str]:
    """Return node → type of its GPUs, as Slurm says; what Slurm does not say is left out."""
    from resilio_hpc.autoparallel.search.inventory import gpus_of  # numpy comes with it
    from resilio_hpc.slurm.client.command_client import CommandClient

    with contextlib.suppress(ResilioError):
        return {node.name: kind for node in CommandClient().nodes(nodes) if (kind := gpus_of(node)[0])}
    return {}


def _before(run_path: Path) -> PlannedLayout | None:
    """Return the layout that stood in the job before, where the run had one."""
    with contextlib.suppress(ResilioError):
        record = joining.read_record(run_path)
        return record.options.planning.plan.standing if record is not None else None
    return None
