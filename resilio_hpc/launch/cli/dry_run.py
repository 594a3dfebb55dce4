"""What a launch would do, without doing it. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from resilio_hpc.launch.cli.option_values import available_nodes
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.gpus.devices import NodeDevices, local_world_size
from resilio_hpc.launch.workers.rank_env import rank_argv

MODES = {
    Mode.OBSERVE: "observe: decisions are written down, nothing is done",
    Mode.CHECKPOINT: "checkpoint: saves, restores and chains; a failure ends the run",
    Mode.RECOVER: "recover: everything, restarts after failures too",
}
CHECKS = {
    "start": "before the first round of each job",
    "restart": "before the first round of a job that goes on where another one stopped",
}


@dataclass(frozen=True)
class LaunchPlan:
    """The launch in figures; ``ranks_per_node`` 0: to be counted on the nodes."""

    program: tuple[str, ...]
    kind: str
    where: str
    nodes_available: int
    nodes_training: tuple[int, int]
    spares: int
    ranks_per_node: int
    world_size: tuple[int, int]
    forked_ranks: bool
    torch: bool
    mpi: str
    run_dir: str
    logs: str
    restarts_without_progress: int
    chained_jobs: int
    checkpoint_dir: str | None
    checkpoints_kept: int
    checkpoints_kept_every: int | None
    checkpoints_kept_hours: float | None
    checkpoints_kept_gb: float | None
    checkpoint_gb_per_s: float | None
    local_checkpoints: str | None
    partner_copies: bool
    mode: Mode
    check_nodes: str
    resized: bool
    notified: tuple[str, ...]  # without their secrets


def plan(
    options: LaunchOptions,
    environment: Mapping[str, str],
    devices: NodeDevices,
    runs_here: bool,
    notified: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan. ``devices``: of this machine, counted if ``runs_here``.

    Raises UsageError as the launch would.
    """
    known = runs_here or options.nproc_per_node.isdecimal()
    ranks = local_world_size(options.nproc_per_node, devices) if known else 0
    job = environment.get("SLURM_JOB_ID")
    in_job = job and not options.standalone and not options.local_nodes
    return LaunchPlan(
        program=rank_argv(options, 0),
        kind=options.kind,
        where=f"Slurm job {job}" if in_job else "this machine",
        nodes_available=available_nodes(environment, options.local_nodes, options.standalone),
        nodes_training=(options.min_nodes, options.max_nodes),
        spares=options.spares,
        ranks_per_node=ranks,
        world_size=(options.min_nodes * ranks, options.max_nodes * ranks),
        forked_ranks=options.zygote and options.kind != "command" and not options.mpi,
        torch=options.torch,
        mpi=options.mpi,
        run_dir=options.run_dir,
        logs=str(options.logs_directory),
        restarts_without_progress=options.max_restarts,
        chained_jobs=options.chain_max if options.chain and options.mode != Mode.OBSERVE and in_job else 0,
        checkpoint_dir=options.checkpoints.checkpoint_dir or None,
        checkpoints_kept=options.checkpoints.keep_checkpoints,
        checkpoints_kept_every=options.checkpoints.keep_every or None,
        checkpoints_kept_hours=options.checkpoints.keep_hours,
        checkpoints_kept_gb=options.checkpoints.keep_gb,
        checkpoint_gb_per_s=options.checkpoints.checkpoint_gb_per_s,
        local_checkpoints=options.checkpoints.local_checkpoints or None,
        partner_copies=options.checkpoints.partner_copies and options.mode != Mode.OBSERVE,
        mode=options.mode,
        check_nodes=options.check_nodes,
        resized=bool(options.resizing.resize and in_job and options.mode == Mode.RECOVER),
        notified=notified,
    )


def as_json(plan: LaunchPlan) -> str:
    """Return the plan as one JSON object."""
    return json.dumps(asdict(plan), indent=2)


def as_text(plan: LaunchPlan) -> str:
    """Return one line per fact."""
    ranks = str(plan.ranks_per_node) if plan.ranks_per_node else "counted on each node"
    world = _range(plan.world_size) if plan.ranks_per_node else "counted on the nodes"
    start = f"forked with{'' if plan.torch else 'out'} torch loaded" if plan.forked_ranks else "new processes"
    if plan.mpi:
        start = f"one srun --mpi={plan.mpi} step per round"
    chain = f"on in a new job at the time limit, {plan.chained_jobs} jobs at most" if plan.chained_jobs else "off"
    restarts = f"{plan.restarts_without_progress} without progress, then stop with a verdict"
    rows = (
        ("program", f"{plan.kind} {shlex.join(plan.program)}"),
        ("where", f"{plan.where}, {plan.nodes_available} node{'s' * (plan.nodes_available != 1)}"),
        ("training", f"{_range(plan.nodes_training)} node{'s' * (plan.nodes_training[1] != 1)}, {plan.spares} spare"),
        ("ranks per node", f"{ranks}, {start}"),
        ("world size", world),
        ("mode", MODES[plan.mode]),
        *((("pair check", CHECKS[plan.check_nodes]),) if plan.check_nodes != "never" else ()),
        ("restarts", restarts if plan.mode == Mode.RECOVER else "none"),
        ("chain", chain),
        *((("resize", "idle nodes are added, and given back, by joiner jobs"),) if plan.resized else ()),
        ("checkpoints", _checkpoints(plan)),
        ("run directory", plan.run_dir),
        ("logs", plan.logs),
        *(("notified", name) for name in plan.notified),
    )
    return "\n".join(f"{name:<15} {value}" for name, value in rows)


def _checkpoints(plan: LaunchPlan) -> str:
    if plan.mode == Mode.OBSERVE:
        return "none"
    every, hours, size = plan.checkpoints_kept_every, plan.checkpoints_kept_hours, plan.checkpoints_kept_gb
    parts = [
        f"the newest {plan.checkpoints_kept} kept" + (f" in {plan.checkpoint_dir}" if plan.checkpoint_dir else ""),
        f"and those of steps that {every} divides" if every else "",
        f"none older than {hours:g} h" if hours else "",
        f"at most {size:g} GB" if size else "",
        f"written at {plan.checkpoint_gb_per_s:g} GB/s per node" if plan.checkpoint_gb_per_s else "",
        f"by way of {plan.local_checkpoints} on each node" if plan.local_checkpoints else "",
        "snapshots also in another node's memory" if plan.partner_copies else "",
    ]
    return ", ".join(part for part in parts if part)


def _range(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
