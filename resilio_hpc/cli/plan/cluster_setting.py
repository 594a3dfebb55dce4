"""The cluster, the software and the run of ``resilio plan``'s searches, from options to the planner's types."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Arch, Machine
from resilio_hpc.autoparallel.base.hardware import machine as known_machine
from resilio_hpc.autoparallel.base.known_words import known_framework, known_interconnect, known_precision
from resilio_hpc.autoparallel.base.layout import Offload, Recompute
from resilio_hpc.autoparallel.base.stack import Stack
from resilio_hpc.autoparallel.measure.measured import apply_each
from resilio_hpc.autoparallel.measure.nearby import Nearby
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.autoparallel.search.failures import Reliability
from resilio_hpc.autoparallel.search.frameworks import DEFAULT, machine_and_stack, space_of
from resilio_hpc.autoparallel.search.inventory import Inventory, take_inventory
from resilio_hpc.autoparallel.search.inventory_file import assumed, read_inventory
from resilio_hpc.autoparallel.search.layout_space import Space
from resilio_hpc.autoparallel.search.offers import OfferRequest, same_kind
from resilio_hpc.cli.plan.predict import calibration_of, file_text, profile_of
from resilio_hpc.cli.plan.search_options import PINS
from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.command_client import CommandClient

MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class ClusterSetting:
    """A cluster and a run. ``machines``: by the GPU's name in the inventory; ``measured``: by the GPU's own.

    ``whole``: the framework's layouts, ``space``: within the user's limits. ``now``: Unix seconds. ``unknown``: what
    was left out; ``notes``: what of a profile is used.
    """

    inventory: Inventory
    request: OfferRequest
    machines: Mapping[str, Machine]
    stack: Stack
    space: Space
    whole: Space
    known: Efficiency
    nearby: Nearby | None
    measured: Mapping[str, Efficiency]
    headroom: float
    reliability: Reliability
    now: float
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def cluster_setting(options: argparse.Namespace, seq: int) -> ClusterSetting:
    """Return the options of cluster, software and run; ``check_words`` has read them. Raises UsageError, SlurmError.

    ``seq``: tokens of a sample.
    """
    reliability = _reliability(options, seq)
    request = _request(options)
    inventory = _inventory(options, request)
    machines, stack, unknown = _machines(options, inventory, request)
    space = _space(options)
    known, nearby = calibration_of(options.calibration)
    headroom = percent("--headroom", options.headroom)
    measured, machines, notes = measured_on(machines, known, profile_of(options.profile))
    pools = tuple(pool for pool in inventory.pools if pool.gpu_type in machines or pool.gpus_per_node == 0)
    return ClusterSetting(
        replace(inventory, pools=pools), request, machines, stack, space, space_of(options.framework), known, nearby,
        measured, headroom, reliability, time.time(), unknown, notes,
    )  # fmt: skip


def measured_on(
    machines: Mapping[str, Machine], known: Efficiency, profile: Profile | None
) -> tuple[dict[str, Efficiency], dict[str, Machine], tuple[str, ...]]:
    """Return efficiencies by GPU and machines with a profile's numbers, and notes for the user."""
    found, notes, measured = dict(machines), list[str](), dict[str, Efficiency]()
    if profile is not None:
        applied = apply_each(profile, list(machines.values()), known)
        for name, (machine, own, said) in zip(machines, applied, strict=True):
            found[name], measured[machine.gpu] = machine, own
            notes += said
    return measured, found, tuple(dict.fromkeys(notes))


def check_words(options: argparse.Namespace) -> None:
    """Refuse unknown software, precision or network, and give known ones the names of the tables."""
    options.framework = known_framework(DEFAULT if options.framework is None else options.framework)
    options.precision = known_precision(options.precision) if options.precision else ""
    options.interconnect = known_interconnect(options.interconnect)


def percent(flag: str, text: str) -> float:
    """Return ``10%`` → 0.1. Raises UsageError."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{flag} {printable(repr(text), 40)}: a part of the memory such as 10%, less than all of it")
    return value


def gpu_range(text: str) -> tuple[int, int]:
    """Return ``64`` → (64, 64), ``32-64`` → (32, 64), "" → (0, 0). Raises UsageError."""
    first, dash, last = text.partition("-")
    if not text:
        return 0, 0
    if not (first.isdecimal() and (last if dash else first).isdecimal() and len(text) < 16):
        raise UsageError(f"--gpus {printable(repr(text), 40)} is neither a number nor a range such as 32-64")
    least, most = int(first), int(last or first)
    if not 1 <= least <= most <= MOST_GPUS:
        raise UsageError(f"--gpus {text}: from 1 to {MOST_GPUS:,}, the smaller number first")
    return least, most


def _request(options: argparse.Namespace) -> OfferRequest:
    least, most = gpu_range(options.gpus)
    names = tuple(name for name in options.partition.split(",") if name)
    return OfferRequest(least, most, names, options.gpu)


def _inventory(options: argparse.Namespace, request: OfferRequest) -> Inventory:
    """Return the inventory of a file, of Slurm, or of the command line."""
    if options.inventory is not None:
        return read_inventory(file_text(options.inventory), str(options.inventory))
    if request.gpu and not request.partitions:
        if not request.most:
            raise UsageError("--gpus N: how many? (--partition P or --inventory FILE takes what the cluster has)")
        if options.per_node is not None and not 1 <= options.per_node <= 1024:
            raise UsageError(f"--per-node {options.per_node}: a node has 1 to 1024 GPUs")
        each = options.per_node or known_machine(request.gpu).node_gpus
        return assumed(request.most, min(each, request.most), request.gpu)
    client = CommandClient()
    try:
        return take_inventory(client.nodes(), client.partitions(), client.jobs())
    except SlurmError as error:
        raise SlurmError(f"{error} (--gpu TYPE --gpus N, or --inventory FILE, needs no Slurm)") from None


def _machines(
    options: argparse.Namespace, inventory: Inventory, request: OfferRequest
) -> tuple[dict[str, Machine], Stack, tuple[str, ...]]:
    """Return machines by their names in the inventory, the stack, and notes on unknown ones."""
    known: dict[str, Machine] = {}
    stacks: dict[str, Stack] = {}
    unknown: list[str] = []
    words = (options.framework, options.precision, options.interconnect)
    for pool in inventory.pools:
        asked = not request.partitions or pool.partition in request.partitions
        if pool.gpus_per_node == 0 or pool.gpu_type in known or not asked:
            continue
        try:
            known[pool.gpu_type], stacks[pool.gpu_type] = machine_and_stack(pool.gpu_type, pool.gpus_per_node, *words)
        except UsageError as error:
            if options.gpu and same_kind(pool.gpu_type, options.gpu):
                raise
            unknown.append(f"partition {printable(pool.partition, 60)} is left out: {error}")
    if unknown and not known:
        raise UsageError(unknown[0])
    if not options.precision and any(one.arch == Arch.VOLTA for one in known.values()):
        unknown.append("V100 has no bf16: fp16 is assumed")
        options.precision = "fp16"
    # bf16 and fp16 differ in the bytes of gradients alone: the larger ones are the safe side
    most = max(stacks.values(), key=lambda one: one.grad_bytes, default=Stack())
    return known, most, tuple(unknown)


def _space(options: argparse.Namespace) -> Space:
    """Return the framework's layouts within the user's limits."""
    space = space_of(options.framework)
    only = {name: getattr(options, name) for name in PINS if getattr(options, name)}
    given = {name: getattr(options, name) for name in (*PINS, "cp")}
    for name, value in given.items():
        if value is not None and value < (name == "cp"):
            raise UsageError(f"--{name.replace('_', '-')} {value} is not possible, it must be 1 or more")
        if value and space.only.get(name, value) != value:
            raise UsageError(f"--{name} {value}: {options.framework} has {name} = {space.only[name]} alone")
    if options.cp and space.cp and options.cp not in space.cp:
        raise UsageError(
            f"--cp {options.cp}: {options.framework} has no context parallelism here (--framework any: all)"
        )
    if options.zero is not None and options.zero not in space.zero:
        stages = ", ".join(map(str, space.zero))
        raise UsageError(f"--zero {options.zero}: {options.framework} has stages {stages} here (--framework any: all)")
    kind = Recompute[options.recompute.upper()] if options.recompute else None
    place = Offload[options.offload.upper()] if options.offload not in (None, "any") else None
    if place is not None and place not in space.offload:
        known = ", ".join(one.name.lower() for one in space.offload)
        raise UsageError(f"--offload {options.offload}: {options.framework} has {known} here (--framework any: all)")
    return replace(
        space,
        only={**space.only, **only},
        cp=(options.cp,) if options.cp else space.cp,
        micro_batch=max(space.micro_batch, options.micro_batch),
        zero=space.zero if options.zero is None else (options.zero,),
        recompute=space.recompute if kind is None else (kind,),
        offload=space.offload if place is None else (place,),
        offload_ranked=options.offload == "any",
    )


def _reliability(options: argparse.Namespace, seq: int) -> Reliability:
    for name in ("steps", "tokens", "restart_s", "checkpoint_s"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value:g} is not possible")
    if not options.mtbf > 0:
        raise UsageError(f"--mtbf {options.mtbf:g}: hours, more than 0")
    if options.steps and options.tokens:
        raise UsageError("one of --steps and --tokens, not both")
    steps = options.steps or math.ceil(options.tokens / (options.global_batch * seq))
    return Reliability(options.mtbf * 3600, options.restart_s, options.checkpoint_s, steps)
