"""The setting of ``resilio plan``'s searches: model, cluster and run, from options to the planner's types."""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from resilio_hpc.autoparallel.base.hardware import Arch, Machine
from resilio_hpc.autoparallel.base.hardware import machine as known_machine
from resilio_hpc.autoparallel.base.known_words import known_framework, known_interconnect, known_precision
from resilio_hpc.autoparallel.base.layout import Offload, Recompute
from resilio_hpc.autoparallel.base.stack import Stack
from resilio_hpc.autoparallel.measure.measured import apply_each
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.autoparallel.model.megatron_arguments import from_megatron
from resilio_hpc.autoparallel.model.model_description import TransformerModel, uniform
from resilio_hpc.autoparallel.model.presets import find_model
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.failures import Reliability
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack, space_of
from resilio_hpc.autoparallel.search.inventory import Inventory, take_inventory
from resilio_hpc.autoparallel.search.inventory_file import assumed, read_inventory
from resilio_hpc.autoparallel.search.layout_space import Space
from resilio_hpc.autoparallel.search.offers import OfferRequest, same_kind
from resilio_hpc.autoparallel.search.ranking import Searched, Training
from resilio_hpc.cli.plan.module_file import function_of, is_module
from resilio_hpc.cli.plan.predict import calibration_of, file_text, profile_of
from resilio_hpc.cli.plan.search_options import PINS
from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.command_client import CommandClient

MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class PlanSetting:
    """A setting. ``machines``: by the GPU's name in the inventory.

    ``now``: Unix seconds. ``whole``: the framework's layouts, without the user's limits. ``notes``: what was left out,
    and what of a profile is used.
    """

    description: TransformerModel
    training: Training
    inventory: Inventory
    request: OfferRequest
    machines: Mapping[str, Machine]
    reliability: Reliability
    now: float
    whole: Space
    notes: tuple[str, ...] = ()


def setting(options: argparse.Namespace) -> PlanSetting:
    """Return all options, read and checked; ask Slurm where no other source is named. Raises UsageError."""
    check_words(options)
    check_model(options)
    description, model = described(options)
    reliability = _reliability(options, model.seq)
    request = _request(options)
    inventory = _inventory(options, request)
    machines, stack, unknown = _machines(options, inventory, request)
    space = _space(options)
    calibrated = options.calibration is not None
    known, nearby = calibration_of(options.calibration)
    headroom = percent("--headroom", options.headroom)
    training = Training(model, options.global_batch, known, stack, space, calibrated, nearby, headroom=headroom)
    training, machines, notes = as_measured(training, machines, profile_of(options.profile))
    pools = tuple(pool for pool in inventory.pools if pool.gpu_type in machines or pool.gpus_per_node == 0)
    kept = replace(inventory, pools=pools)
    whole = space_of(options.framework)
    said = (*unknown, *_length_note(options, model.seq), *notes)
    return PlanSetting(description, training, kept, request, machines, reliability, time.time(), whole, said)


def _length_note(options: argparse.Namespace, seq: int) -> tuple[str, ...]:
    """Say where the length of sequences comes from, where the options do not."""
    if options.seq or "--seq-length" in (options.megatron or "").replace("_", "-"):
        return ()
    if options.megatron is not None:
        return (f"sequences of {seq:,} tokens are assumed, Megatron's default: --seq N says how long yours are",)
    if options.module is not None or not Path(options.model).exists():  # a preset, whose table is shown by --list
        return ()
    return (
        f"sequences of {seq:,} tokens are assumed, the longest of {options.model}: --seq N says how long yours are",
    )


def as_measured(
    training: Training, machines: Mapping[str, Machine], profile: Profile | None
) -> tuple[Training, dict[str, Machine], tuple[str, ...]]:
    """Return the training and machines with a profile's numbers, and notes for the user."""
    found, notes, measured = dict(machines), list[str](), dict(training.measured)
    if profile is not None:
        for name, (machine, own, said) in zip(
            machines, apply_each(profile, list(machines.values()), training.efficiency), strict=True
        ):
            found[name], measured[machine.gpu] = machine, own
            notes += said
    return replace(training, measured=measured), found, tuple(dict.fromkeys(notes))


def check_words(options: argparse.Namespace) -> None:
    """Refuse unknown software, precision or network, and give known ones the names of the tables."""
    options.framework = known_framework(options.framework)
    options.precision = known_precision(options.precision) if options.precision else ""
    options.interconnect = known_interconnect(options.interconnect)


def check_model(options: argparse.Namespace) -> None:
    """Refuse a wrong model or batch."""
    if options.module is None and is_module(options.model):
        options.model, options.module = None, options.model
    if [options.model, options.megatron, options.module].count(None) != 2:
        raise UsageError("one of MODEL, --megatron and --module must be given (resilio plan model --list: the presets)")
    if options.global_batch < 1:
        raise UsageError(f"--global-batch {options.global_batch or '…'}: how many sequences is an iteration? 1 or more")
    if options.seq < 0:
        raise UsageError(f"--seq {options.seq}: there must be at least 1 token")


def described(options: argparse.Namespace) -> tuple[TransformerModel, Transformer]:
    """Return the model, and its form for the cost model."""
    if options.module is not None:
        require("torch", "--module")
        from resilio_hpc.autoparallel.model.module_description import described_module

        found = described_module(function_of(options.module), options.module)
    elif options.megatron is None:
        found = find_model(options.model)
    else:
        try:
            found = from_megatron(shlex.split(options.megatron))
        except ValueError as error:
            raise UsageError(f"--megatron: {error}") from error
    return found, uniform(found, options.seq)


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
        cp=(options.cp,) if options.cp else (),
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


@dataclass(frozen=True)
class PlanAnswer:
    """The answer. ``choices``: ranked, one per shape; ``front``: those that no other beats.

    ``took_s``: of the search; ``best``: the fastest layouts of the first choice's shape.
    """

    choices: list[Choice]
    front: list[Choice]
    searched: list[Searched]
    took_s: float
    best: list[Choice] = field(default_factory=list)
