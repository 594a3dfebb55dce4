"""What is measured of a computation: loss, norm and digest of the gradients, the first value that is not finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from resilio_hpc.train.validation.digest_plan import folded
from resilio_hpc.train.validation.tensor_digest import digest_of, size_of


def gradients(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return names and gradients of the parameters that have one."""
    return [(name, one.grad) for name, one in model.named_parameters() if one.grad is not None]


def norm_of(model: torch.nn.Module) -> float:
    """Return the norm of all gradients together. Waits for the devices."""
    found = [grad.to_local() if hasattr(grad, "to_local") else grad for _, grad in gradients(model)]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in found]
    if not dense:
        return 0.0
    norms = torch._foreach_norm(dense)  # what torch.nn.utils.clip_grad_norm_ calls
    return math.sqrt(sum(float(norm) ** 2 for norm in norms)) if len(norms) < 2 else _together(norms)


def _together(norms: Any) -> float:
    first = norms[0].device
    return float(torch.linalg.vector_norm(torch.stack([norm.to(first, torch.float64) for norm in norms])))


def digest_gradients(model: torch.nn.Module) -> int:
    """Return a digest of all gradients' bytes."""
    dense = [grad.coalesce().values() if grad.is_sparse else grad for _, grad in gradients(model)]
    return folded([[digest_of(grad, 0, size_of(grad)) for grad in dense]])[0]


def loss_of(result: Any) -> float:
    """Return the loss that a program's function returned. Waits for its device."""
    return float(result.detach()) if isinstance(result, torch.Tensor) else float(result)


class FirstBad:
    """The first module whose output is not finite, in the order of the forward pass; "" without one."""

    def __init__(self) -> None:
        self.module = ""

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Look at all outputs of a forward pass: each look waits for the device."""
        hooks = [
            module.register_forward_hook(self._hook(name))
            for name, module in model.named_modules() if not any(module.children())
        ]  # fmt: skip
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if not self.module and not _is_finite(output):
                self.module = f"{name} ({type(module).__name__})"

        return look

    def or_gradient(self, model: torch.nn.Module) -> str:
        """Return the module; else the last parameter with a gradient that is not finite: there it began."""
        if not self.module:
            bad = [name for name, grad in gradients(model) if not _is_finite(grad)]
            return f"gradient of {bad[-1]}" if bad else ""
        return self.module


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))
