"""Why a model cannot be traced, in a line: what, where in the user's code, and what to do instead."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

INSTEAD = "describe the model by a preset, config.json or Megatron's arguments"
_NOT_USERS = {Path(__file__).parents[2], Path(torch.__file__).parent, Path(contextlib.__file__).parent}
_VALUES = "the values of a tensor, of which a trace knows only the shape"


def cannot_trace(name: str, error: Exception) -> UsageError:
    """For an error of the forward pass."""
    what, remedy = _reason(error)
    return UsageError(f"{name} cannot be traced: {what}{_where(error)}: {remedy}")


def cannot_build(error: Exception) -> UsageError:
    """For an error while the model was made without memory for its tensors."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException) or "meta tensors" in str(error):
        what, remedy = f"it reads {_VALUES}", "compute that with Python numbers, or give a module that is made already"
    else:
        what, remedy = _text(error), "give a module that is made already"
    return UsageError(f"the model cannot be made without memory for its tensors: {what}{_where(error)}: {remedy}")


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{error.func} makes a tensor whose shape depends on {_VALUES}",
            f"use a fixed capacity with a mask instead (for experts: tokens per expert), or {INSTEAD}",
        )
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        return (
            f"which way it goes depends on {_VALUES}",
            f"use torch.where, or a Python number given to the model when it is made, or {INSTEAD}",
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} says nothing about its result's shape", "torch.library.register_fake can tell it"
    missing = re.search(r"(\w+::\w+)[^\n]*(?:fake impl|no kernel|meta)", str(error), re.IGNORECASE)
    if missing:
        return f"{missing[1]} says nothing about its result's shape", "torch.library.register_fake can tell it"
    return _text(error), f"it must run with these inputs on the CPU; or {INSTEAD}"


def _text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(f"{type(error).__name__}: {lines[0] if lines else ''}", 240)


def _where(error: Exception) -> str:
    """The last line of the user's own code that was running."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not _NOT_USERS.intersection(path.parents):
            return f" (at {printable(path.name, 60)}:{frame.lineno}: {printable(frame.line or '', 80)})"
    return ""
