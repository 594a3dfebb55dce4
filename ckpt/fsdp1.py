"""torch's FullyShardedDataParallel (FSDP1) in a state, by the names and shapes of the parameters that it has flattened.

FSDP1 keeps the parameters of each wrapped module in one flat tensor, cut evenly between the ranks. What a rank has of a
parameter is a range of its elements (``FlatSlab``), so nothing is gathered, and any number of ranks, another wrapping,
or a plain model can load it. The metadata of the flat tensors are torch's own; there is no public way to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resilio_hpc.ckpt.state.containers import NOTHING
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.module_names import clean_name, fsdp_modules, persistent_buffers
from resilio_hpc.core.errors import UsageError


def fsdp_state(model: Any, *optimizers: Any) -> dict[str, Any]:
    """Return, for a state, a model with FSDP1 modules in it, and torch optimizers of its parameters.

    Make it again for each save and restore. Buffers, and parameters that FSDP was told to ignore, are as they are: with
    another number of ranks they must be the same on all. Raises UsageError for what cannot be cut otherwise, and in the
    midst of a forward or backward pass.
    """
    shards = _Shards(model)
    return {
        "parameters": shards.parameters() | shards.plain,
        "buffers": {clean_name(name): buffer for name, buffer in persistent_buffers(model)},
        "optimizers": [FsdpOptimizer(model, optimizer, shards) for optimizer in optimizers],
    }


@dataclass(frozen=True)
class _Range:
    """Where a parameter's elements lie: ``count`` from ``first`` on, at ``offset`` of this rank's flat tensor."""

    shape: tuple[int, ...]
    first: int
    offset: int
    count: int
    replica: int


class _Shards:
    """What this rank has of a model's parameters."""

    def __init__(self, model: Any) -> None:
        self.ranges: dict[str, _Range] = {}  # by name, of all parameters that are flattened
        self.flat_of: dict[str, Any] = {}
        self.tied: dict[str, str] = {}  # other names of parameters that several modules share
        self.names_of: dict[int, list[str]] = {}  # by the id of a parameter as optimizers know it
        found = list(fsdp_modules(model))
        if not found:
            raise UsageError("fsdp_state: no module of the model is a FullyShardedDataParallel")
        for prefix, module in found:
            if module._handle is not None:
                self._add(prefix, module, module._handle)
        self.plain = {
            clean_name(name): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) not in self.names_of and clean_name(name) not in self.ranges
        }
        for name, parameter in self.plain.items():
            self.names_of.setdefault(id(parameter), []).append(name)

    def _add(self, prefix: str, module: Any, handle: Any) -> None:
        flat = handle.flat_param
        shard = getattr(flat, "_local_shard", flat)  # there from the first forward pass on
        if handle._training_state.name != "IDLE" or flat.shape != shard.shape:
            raise UsageError("fsdp_state: parameters are gathered now; save and restore between two steps")
        if any(extension is not None for extension in flat._param_extensions):
            raise UsageError("fsdp_state: DTensors below FSDP1 cannot be saved; use fully_shard (FSDP2)")
        between = getattr(module, "_inter_node_pg", None)  # of HYBRID_SHARD: groups with the same shards
        replica = between.rank() if between is not None else 0 if handle.uses_sharded_strategy else handle.rank
        names = [_joined(prefix, name) for name in flat._fqns]
        for number, (name, info) in enumerate(zip(names, flat._shard_param_infos, strict=True)):
            first, offset, count = info.intra_param_start_idx or 0, info.offset_in_shard or 0, info.numel_in_shard or 0
            self.ranges[name] = _Range(tuple(flat._shapes[number]), first, offset, count, replica)
            self.flat_of[name] = flat
            if flat._params is not None:
                self.names_of[id(flat._params[number])] = [name]
        self.names_of[id(flat)] = names
        for number, shared in enumerate(flat._shared_param_infos):
            original = _joined(prefix, shared.prim_module_name, shared.prim_param_name)
            name = _joined(prefix, shared.module_name, shared.param_name)
            self.ranges[name], self.flat_of[name], self.tied[name] = self.ranges[original], flat, original
            if flat._shared_params is not None:
                self.names_of.setdefault(id(flat._shared_params[number]), [original])

    def part(self, name: str, flat: Any) -> FlatSlab:
        """Return what this rank has of a parameter; ``flat``: this rank's flat tensor, or one laid out as that."""
        one = self.ranges[name]
        return FlatSlab(flat[one.offset : one.offset + one.count], one.shape, one.first, replica=one.replica)

    def parameters(self) -> dict[str, FlatSlab]:
        """Return this rank's parts of all flattened parameters; tied ones are one object."""
        made = {name: self.part(name, self.flat_of[name].detach()) for name in self.ranges if name not in self.tied}
        return made | {name: made[original] for name, original in self.tied.items()}

    def parts_of(self, parameter: Any, value: Any) -> Iterator[tuple[str, FlatSlab]]:
        """Yield names and parts of ``value``, which has an element for each of an optimizer's parameter."""
        names, flat = self.names_of[id(parameter)], value.detach().reshape(-1)
        if parameter is self.flat_of.get(names[0]):
            yield from ((name, self.part(name, flat)) for name in names)
        else:
            one = self.ranges[names[0]]
            yield names[0], FlatSlab(flat, one.shape, one.first, replica=one.replica)


class FsdpOptimizer:
    """A torch optimizer of an FSDP1 model, whose state has the names of parameters. ``fsdp_state`` makes it."""

    def __init__(self, model: Any, optimizer: Any, shards: _Shards) -> None:
        """Check that the model has all parameters of the optimizer. Raises UsageError."""
        self.stands_for = (model, optimizer)
        self._optimizer, self._shards = optimizer, shards
        self._fresh: dict[int, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            if any(id(parameter) not in shards.names_of for parameter in group["params"]):
                raise UsageError(
                    "fsdp_state: the optimizer has parameters that are not the model's now; make it after the model is "
                    "wrapped"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return its state by names. Raises UsageError for state that is neither a number nor as its parameter is."""
        state: dict[str, dict[str, Any]] = {}
        for parameter, values in self._optimizer.state.items():
            names = self._shards.names_of[id(parameter)]
            for name in names:
                state[name] = {}
            for key, value in values.items():
                if names[0] in self._shards.ranges and hasattr(value, "detach") and value.dim():
                    if value.shape != parameter.shape:
                        raise UsageError(
                            f"fsdp_state: {key} of {names[0]} has shape {list(value.shape)}, not one element for each "
                            "of the parameter's, and cannot be cut otherwise"
                        )
                    for name, part in self._shards.parts_of(parameter, value):
                        state[name][key] = part
                else:
                    for name in names:
                        state[name][key] = value
        return {"state": state, "param_groups": self._groups()}

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [name for one in group["params"] for name in self._shards.names_of[id(one)]]}
            for group in self._optimizer.param_groups
        ]

    def restore_template(self, saved: Callable[..., Any], dtype_of: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the places that a restore fills; ``load_state_dict`` takes them.

        ``saved``: returns what a step has at a path, or NOTHING; ``dtype_of``: of a tensor there that was saved in
        parts, None of all else.
        """
        self._fresh = {}
        state: dict[str, dict[str, Any]] = {}
        for parameter in (one for group in self._optimizer.param_groups for one in group["params"]):
            names = self._shards.names_of[id(parameter)]
            if names[0] not in self._shards.ranges or (not parameter.numel() and len(names) == 1):
                continue
            found = {name: saved("state", name) for name in names}
            keys = {
                key: dtype_of(value)
                for values in found.values()
                if values is not NOTHING
                for key, value in values.items()
            }
            lacking = [name for name, values in found.items() if values is NOTHING or values.keys() != keys.keys()]
            if keys and lacking:
                raise ValueError(
                    f"{', '.join(lacking[:3])} had no such state as the parameters it is flattened with now"
                )
            for key, dtype in keys.items():
                if dtype is not None:
                    fresh = parameter.detach().new_zeros(parameter.shape, dtype=dtype)
                    self._fresh.setdefault(id(parameter), {})[key] = fresh
                    for name, part in self._shards.parts_of(parameter, fresh):
                        state.setdefault(name, {})[key] = part
        return {"state": state}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take a state that was filled into the places of ``restore_template``. Raises ValueError where it differs."""
        groups = [self._group_of(group, loaded["param_groups"]) for group in self._groups()]
        taken: dict[Any, dict[str, Any]] = {}
        for parameter in (one for group in self._optimizer.param_groups for one in group["params"]):
            names = self._shards.names_of[id(parameter)]
            values = [loaded["state"].get(name) for name in names]
            if values[0] is None:
                continue
            others = [{key: value for key, value in one.items() if type(value) is not FlatSlab} for one in values]
            if any(not _is_same(one, others[0]) for one in others):
                raise ValueError(
                    f"{names[0]} and others that are one flat parameter now differ in {', '.join(others[0])}"
                )
            taken[parameter] = {**others[0], **self._taken(parameter, dict(zip(names, values, strict=True)))}
        self._fresh = {}
        self._optimizer.state.clear()
        self._optimizer.state.update(taken)
        for group, kept in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(kept)

    def _taken(self, parameter: Any, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the tensors of a parameter's state: those that were filled in place, or new ones with copies."""
        found = {}
        for key, first in next(iter(values.values())).items():
            if type(first) is not FlatSlab:
                continue
            fresh = self._fresh.get(id(parameter), {}).get(key)
            if fresh is None:
                fresh = parameter.detach().new_zeros(parameter.shape, dtype=first.tensor.dtype)
            for name, part in self._shards.parts_of(parameter, fresh):
                if part.tensor.data_ptr() != values[name][key].tensor.data_ptr():
                    part.tensor.copy_(values[name][key].tensor)
            found[key] = fresh
        return found

    @staticmethod
    def _group_of(mine: Mapping[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
        names = set(mine["params"])
        for group in saved:
            if names <= set(group["params"]):
                return {key: value for key, value in group.items() if key != "params"}
        raise ValueError(f"no parameter group of the checkpoint has all of {sorted(names)[:3]}")


def _joined(*names: str) -> str:
    return clean_name(".".join(name for name in names if name))


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(value == other[key]) for key, value in one.items())
