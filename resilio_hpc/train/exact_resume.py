"""Bit-exact resume with plain DistributedDataParallel: rebuild its gradient buckets before the first step of a life.

DDP starts with buckets in reverse registration order and, before its second iteration, rebuilds them in the order in
which gradients became ready. Each element's place in a bucket decides the order in which the ranks' gradients are
summed, so the first iteration of every process life rounds differently from all later ones. A run that was restarted
therefore drifts from one that was not, unless the rebuild happens before its first step. See docs/exact-resume.md.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from resilio_hpc.ckpt.devices.registry import DEVICES
from resilio_hpc.core.errors import UsageError

if TYPE_CHECKING:
    import torch

# with static_graph=True the first iteration only records the graph, and the second one decides the order
_MOST_ITERATIONS = 3


def warm_up_ddp(model: torch.nn.Module, forward_backward: Callable[[], object] | None = None) -> int:
    """Make every step of this process use the same gradient buckets, and leave no other trace.

    Call it on **all** ranks in **every** life, after a fresh start too (a run that restarts from step 0 then repeats
    as well), after the state was restored and before the first step. ``forward_backward`` does one ordinary
    forward and backward pass through ``model`` (``loss(model(x), y).backward()``; any batch of the right shape; no
    optimizer step, no ``no_sync()``). Gradients, buffers (BatchNorm's running statistics) and the global random
    number generators (Python, NumPy, torch CPU and CUDA) are put back afterwards; generators of your own are not.

    Returns the number of passes made: 1 as a rule, 2 with ``static_graph=True``, and 0 where nothing is needed: a
    model without DDP, ``find_unused_parameters=True`` (never rebuilds), or buckets rebuilt already.
    Raises UsageError if the buckets could not be rebuilt or if ``forward_backward`` changed parameters.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return 0
    if (model.find_unused_parameters and not model.static_graph) or _has_rebuilt_buckets(model):
        return 0
    if forward_backward is None:
        if model.static_graph:
            return 0  # the graph that it would record is not the model's
        forward_backward = partial(_zero_gradients, model)
    with _without_trace(model):
        for passes in range(1, _MOST_ITERATIONS + 1):
            forward_backward()
            # DDP itself makes this call at the start of the next forward pass; it is False until an order is known
            if model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True  # as DDP does after its own call
            if _has_rebuilt_buckets(model):
                return passes
    raise UsageError(
        f"warm_up_ddp: DDP did not rebuild its gradient buckets after {_MOST_ITERATIONS} passes, so this run cannot "
        "resume exactly; forward_backward must call the DDP-wrapped model and backward(), not within no_sync()"
    )


def ddp_wrappers(models: Sequence[object]) -> list[Any]:
    """Return the DistributedDataParallel of these models, in their order: a script may have it, and no one else."""
    from torch.nn.parallel import DistributedDataParallel

    inner = [id(model) for model in models]
    found = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return sorted((one for one in found if id(one.module) in inner), key=lambda one: inner.index(id(one.module)))


def _zero_gradients(model: torch.nn.Module) -> None:
    """Make a pass whose gradients are zero, and become ready from the last parameter to the first."""
    module: Any = model.module
    parameters = [one for one in module.parameters() if one.requires_grad]

    def forward() -> torch.Tensor:
        total: torch.Tensor = (parameters[0] * 0).sum()
        for parameter in parameters[1:]:
            total = total + (parameter * 0).sum()
        return total

    own = vars(module).get("forward")
    module.forward = forward
    try:
        model().backward()
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _has_rebuilt_buckets(model: torch.nn.Module) -> bool:
    logged = model._get_ddp_logging_data().get("has_rebuilt_buckets")  # type: ignore[operator]
    return bool(logged) or bool(getattr(model, "_has_rebuilt_buckets", False))


@contextmanager
def _without_trace(model: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random number generators afterwards; refuse changed parameters."""
    import torch

    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    versions = [parameter._version for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        with _same_random_state():
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)
    if [parameter._version for parameter in parameters] != versions:
        raise UsageError(
            "warm_up_ddp: forward_backward changed parameters of the model; it must not step an optimizer "
            "(one that runs inside backward has to be attached after warm_up_ddp)"
        )


@contextmanager
def _same_random_state() -> Iterator[None]:
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = DEVICES.rng_states()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        DEVICES.set_rng_states(devices)
