"""The setting of ``resilio plan``'s searches: model, cluster and run, from options to the planner's types."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.autoparallel.model.megatron_arguments import from_megatron
from resilio_hpc.autoparallel.model.model_description import TransformerModel, uniform
from resilio_hpc.autoparallel.model.presets import find_model
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.ranking import Training
from resilio_hpc.cli.plan.cluster_setting import ClusterSetting, check_words, cluster_setting, measured_on
from resilio_hpc.cli.plan.module_file import function_of, is_module
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import require


@dataclass(frozen=True)
class PlanSetting:
    """A setting. ``notes``: what was left out, and what of a profile is used."""

    description: TransformerModel
    training: Training
    cluster: ClusterSetting
    notes: tuple[str, ...] = ()

    @property
    def machines(self) -> Mapping[str, Machine]:
        """Return the machines, by the GPU's name in the inventory."""
        return self.cluster.machines


def setting(options: argparse.Namespace) -> PlanSetting:
    """Return all options, read and checked; ask Slurm where no other source is named. Raises UsageError."""
    check_words(options)
    check_model(options)
    description, model = described(options)
    cluster = cluster_setting(options, model.seq)
    training = Training(
        model, options.global_batch, cluster.known, cluster.stack, cluster.space, options.calibration is not None,
        cluster.nearby, cluster.measured, cluster.headroom,
    )  # fmt: skip
    notes = (*cluster.unknown, *_length_note(options, model.seq), *cluster.notes)
    return PlanSetting(description, training, cluster, notes)


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
    own, found, notes = measured_on(machines, training.efficiency, profile)
    return replace(training, measured={**training.measured, **own}), found, notes


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
