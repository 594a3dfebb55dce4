"""Torch optimizers in a restore: their saved state in the order, shapes and layout of their own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilio_hpc.ckpt.format.manifest import TensorRecord
from resilio_hpc.ckpt.restore.targets import Path
from resilio_hpc.ckpt.state import saved_optimizer, tensors
from resilio_hpc.ckpt.state.containers import NOTHING
from resilio_hpc.ckpt.state.decoded_tree import Parameters, TensorRef
from resilio_hpc.ckpt.state.module_names import modules_in, parameter_names
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.slab import Shape
from resilio_hpc.core.errors import LayoutMismatch


class Optimizers:
    """The optimizers of a restore, each handed to ``arranged``."""

    def __init__(self, records: Sequence[TensorRecord], parameters: Mapping[Path, Parameters], state: Any) -> None:
        """Begin with none.

        ``records``: of the saved tensors, to which more may be added. ``parameters``: see ``decoded_tree.read``.
        ``state``: the live one, of whose modules the parameters are.
        """
        self._records, self._parameters = records, parameters
        self._modules = list(modules_in(state)) if any(one.names for one in parameters.values()) else []
        self._with_state: list[Path] = []

    def arranged(self, live: Any, saved: dict[Any, Any], path: Path) -> dict[Any, Any]:
        """Return an optimizer's state in the order of its own parameters. Raises LayoutMismatch."""
        if saved["state"]:
            self._with_state.append(path)
        shapes, names = self._parameters.get(path, (None, None))
        own_names = parameter_names(self._modules, live) if names is not None else None
        saved, numbers = saved_optimizer.arranged(live, saved, place(path), (own_names, names))
        if shapes is not None and len(shapes) == len(numbers):
            shapes = [shapes[number] for number in numbers]
        else:
            shapes = None
        saved_optimizer.check_shapes(live, saved, shapes, self._shape_of, place(path))
        return saved

    def _shape_of(self, saved: Any) -> Shape | None:
        if not isinstance(saved, TensorRef) or saved.index >= len(self._records):
            return None
        record = self._records[saved.index]
        return record.shape if record.slab is None else record.slab.global_shape

    def template(self, live: Any, saved: dict[Any, Any]) -> Any:
        """Return, for a torch optimizer whose state was saved in parts, the parts of its own layout.

        Its own state does not exist before the first step, and is laid out as the parameters are.
        """
        import torch

        parameters = saved_optimizer.parameters_of(live)
        state: dict[Any, Any] = {}
        for index, values in saved["state"].items():
            for name, ref in values.items() if isinstance(values, dict) and index in range(len(parameters)) else ():
                known = isinstance(ref, TensorRef) and ref.index < len(self._records)
                record = self._records[ref.index] if known else None
                like = parameters[index]
                if record is not None and record.slab is not None:
                    if record.slab.global_shape == tuple(like.shape):
                        fresh = torch.empty_like(like, dtype=tensors.torch_dtype(record.dtype), requires_grad=False)
                    else:  # of another shape, such as a number of steps: whole in every process
                        fresh = tensors.empty(record.kind, record.dtype, record.slab.global_shape)
                    state.setdefault(index, {})[name] = fresh
        return {"state": state} if state else NOTHING

    def refuse_other_numbers(self) -> None:
        """Raise LayoutMismatch if there is any with state: where layers are elsewhere, its numbers mean others."""
        if self._with_state:
            raise LayoutMismatch(
                f"{place(self._with_state[0])}: layers are on other ranks now, and an optimizer knows parameters by "
                "number; save get_optimizer_state_dict(), with flatten_optimizer_state_dict=True, which names them"
            )
