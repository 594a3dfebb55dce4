"""What DeepSpeed's ZeRO has partitioned, as parts of whole parameters, whatever its stage and the number of ranks.

ZeRO lays parameters flat behind one another, and gives each rank a range of that: of float32 weights, and of the
optimizer's state. Here each parameter's part of that range is a slab of the flat parameter, under its name. So another
number of ranks, or another stage, finds its own parts. The weights that the model computes with are made of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from resilio_hpc.ckpt import Slab
from resilio_hpc.core.errors import UsageError

MASTER = "weight"  # beside the optimizer's own names, such as exp_avg
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class _Fragment(NamedTuple):
    """A part of a parameter here: ``size`` elements from ``offset`` in a flat tensor, from ``start`` in itself."""

    name: str
    whole: int
    start: int
    offset: int
    size: int


class ZeroState:
    """The state of one DeepSpeed engine, between two of its steps."""

    def __init__(self, engine: Any) -> None:
        """``engine``: of ``deepspeed.initialize``. Raises UsageError for what is not known here."""
        self._engine = engine
        self._zero: Any = engine.optimizer
        self._stage = _stage_of(engine)
        self._rank = torch.distributed.get_rank()
        self._fragments = list(self._of_stage_3() if self._stage == 3 else self._of_stages_1_and_2())
        self._slabs: dict[str, dict[str, Slab]] = {}
        self._made_of: list[int] = []

    def parts(self) -> dict[str, Any]:
        """Return what is saved and restored, in place."""
        schedule = self._engine.lr_scheduler
        return {
            "partitioned": self._partitioned(),
            "whole": self._optimizer_values(),
            "frozen": self._frozen(),
            "buffers": dict(_buffers(self._engine.module)),
            "schedule": [schedule] if hasattr(schedule, "state_dict") else [],
            "scaler": [one for one in [self._zero.torch_autocast_gradscaler] if one is not None],
            "engine": self,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what is small."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self._zero.optimizer.param_groups
        ]
        scale = {key: value for key, value in vars(self._zero.loss_scaler).items() if _is_plain(value)}
        counters = {name: getattr(self._engine, name) for name in _COUNTERS}
        return {"groups": groups, "loss_scale": scale, "counters": counters, "values": self._plain_values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what is small."""
        for group, saved in zip(self._zero.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        vars(self._zero.loss_scaler).update(state["loss_scale"])
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)
        for flat, values in zip(self._flats(), state["values"], strict=True):
            self._zero.optimizer.state[flat].update(values)
        if hasattr(self._zero.optimizer, "ds_opt_adam"):
            _count_again(self._zero.optimizer, max(values["step"] for values in state["values"]))

    # -- before and after a restore --------------------------------------------------------------------------------

    def make_optimizer_state(self) -> bool:
        """Make the optimizer's state, which is there after its first step alone. Return whether it was missing."""
        inner = self._zero.optimizer
        if all(inner.state.get(flat) for flat in self._flats()):
            return False
        step = type(inner).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # it is no step of training
        groups = inner.param_groups
        try:
            for at, flat in enumerate(self._flats()):
                group = groups[self._zero.sub_group_to_group_id[at] if self._stage == 3 else at]
                inner.param_groups = [{**group, "params": [flat], "lr": 0.0, "weight_decay": 0.0}]
                gradient, flat.grad = flat.grad, torch.zeros_like(flat)
                step(inner)
                flat.grad = gradient
        finally:
            inner.param_groups = groups
        return True

    def drop_optimizer_state(self) -> None:
        """Have no state of the optimizer, as before its first step."""
        self._zero.optimizer.state.clear()

    def put_into_model(self) -> None:
        """Make the weights that the model computes with of the restored ones. All ranks call it."""
        zero = self._zero
        if self._stage < 3:
            zero.update_lp_params()
            zero._lazy_init_hp_params_optimizer_state()  # else DeepSpeed knows it only after the next step
            return
        zero.checkpoint_event_prologue()
        for at, flat in enumerate(zero.fp32_partitioned_groups_flat):
            zero.fp16_partitioned_groups_flat[at].data.copy_(flat.data)
            zero._unflatten_partitioned_parameters(at)
        zero.checkpoint_event_epilogue()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _flats(self) -> list[Any]:
        """Return the flat float32 weights of this rank: one tensor for each group of parameters."""
        zero = self._zero
        return list(zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups)

    def _of_stages_1_and_2(self) -> Iterator[tuple[int, _Fragment]]:
        for at, group in enumerate(self._zero.bit16_groups):
            for parameter in group:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    name = self._zero.param_names[parameter]
                    yield at, _Fragment(name, parameter.numel(), there.start, here.start, here.numel)

    def _of_stage_3(self) -> Iterator[tuple[int, _Fragment]]:
        zero = self._zero
        for at, group in enumerate(zero.fp16_groups):
            for parameter in group:
                _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                start = torch.distributed.get_rank(parameter.ds_process_group) * size
                count = min(size, parameter.ds_numel - start)  # the last parts are padded, or empty
                if count > 0:
                    yield at, _Fragment(zero.param_names[parameter], parameter.ds_numel, start, offset, count)

    def _partitioned(self) -> dict[str, dict[str, Slab]]:
        """Return the slabs, made again where the optimizer has other tensors than before."""
        flats, state = self._flats(), self._zero.optimizer.state
        tensors = [{MASTER: flat, **_like(flat, state.get(flat, {}))} for flat in flats]
        made_of = [id(tensor) for of_group in tensors for tensor in of_group.values()]
        if made_of != self._made_of:
            self._made_of = made_of
            self._slabs = {
                one.name: {
                    key: Slab(flat.detach().narrow(0, one.offset, one.size), (one.whole,), (one.start,))
                    for key, flat in tensors[at].items()
                }
                for at, one in self._fragments
            }
        return self._slabs

    def _optimizer_values(self) -> list[dict[str, Any]]:
        """Return the optimizer's other tensors, such as a number of steps, which all ranks have alike."""
        found = []
        for flat in self._flats():
            values = self._zero.optimizer.state.get(flat, {})
            like = _like(flat, values)
            found.append({key: one for key, one in values.items() if torch.is_tensor(one) and key not in like})
        return found

    def _plain_values(self) -> list[dict[str, Any]]:
        states = [self._zero.optimizer.state.get(flat, {}) for flat in self._flats()]
        return [{key: one for key, one in values.items() if not torch.is_tensor(one)} for values in states]

    def _frozen(self) -> dict[str, Slab]:
        """Return the parameters that are not trained: of stage 3 this rank's parts, else rank 0's."""
        found = {}
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                continue
            if self._stage == 3:
                size = parameter.ds_tensor.ds_numel
                start = torch.distributed.get_rank(parameter.ds_process_group) * size
                count = min(size, parameter.ds_numel - start)
                if count > 0:
                    found[name] = Slab(parameter.ds_tensor.data.narrow(0, 0, count), (parameter.ds_numel,), (start,))
            else:
                flat = parameter.data.view(-1)
                found[name] = Slab(flat, tuple(flat.shape), (0,), replica=min(self._rank, 1))
        return found


def _stage_of(engine: Any) -> int:
    """Return the stage of ZeRO. Raises UsageError where its parts are laid out in a way that is not known here."""
    stage = int(engine.zero_optimization_stage())
    kind = type(engine.optimizer).__name__
    known = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
    if known.get(stage) != kind:
        raise UsageError(f"this adapter knows ZeRO 1, 2 and 3, not stage {stage} with {kind}")
    refused = {
        "a PipelineModule": type(engine).__name__ == "PipelineEngine",
        "model parallelism": engine.mp_world_size > 1,
        "mixtures of experts": engine.has_moe_layers,
        "zero_hpz_partition_size": stage == 3 and engine.zero_hpz_partition_size() > 1,
        "offload of parameters": stage == 3 and engine.zero_offload_param() is not None,
        "offload of a part of the optimizer": getattr(engine.optimizer, "partial_offload", 1.0) != 1.0,
        "offload to NVMe": bool(getattr(engine.optimizer, "swap_optimizer", False)),
    }
    for what, is_so in refused.items():
        if is_so:
            raise UsageError(f"this adapter knows ZeRO by data parallelism, not {what}")
    return stage


def _like(flat: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's tensors that have an element for each weight."""
    return {key: one for key, one in values.items() if torch.is_tensor(one) and one.shape == flat.shape}


def _count_again(adam: Any, steps: int) -> None:
    """Bring the library of DeepSpeedCPUAdam to where it is after so many steps.

    It keeps powers of the betas as products, a factor for each step. Where it is not at the step before, it computes
    them by ``pow``, which rounds otherwise. So a parameter of one element goes through all steps.
    """
    one = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        for group in adam.param_groups:
            adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *group["betas"], 1.0, 0.0, True, *one)


def _buffers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers that belong into a checkpoint, by name."""
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)
