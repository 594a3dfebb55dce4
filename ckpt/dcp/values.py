"""Plain values from and to a planner of ``torch.distributed.checkpoint``, which passes them as pickles.

Such a pickle is made and read within this process. No byte of it goes into a checkpoint, and none comes out of one.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from resilio_hpc.ckpt.state.plain_values import CLASSES
from resilio_hpc.core.errors import UsageError


def value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the plain value that a planner would have written. Raises UsageError for other bytes."""
    if isinstance(planner, DefaultSavePlanner) and _leaves_values_alone(type(planner)):
        return planner.lookup_object(item.index)
    stream = planner.resolve_data(item)
    if not isinstance(stream, io.BytesIO):
        raise UsageError(f"{item.index.fqn}: the planner gives a {type(stream).__name__}, not the bytes of a value")
    stream.seek(0)
    try:  # torch and its unpickler raise any exception for other bytes
        with torch.serialization.safe_globals(CLASSES):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"{item.index.fqn}: the planner's bytes are not what torch.save makes of plain values and tensors: {why}"
        ) from error


def _leaves_values_alone(kind: type[DefaultSavePlanner]) -> bool:
    base = DefaultSavePlanner
    return kind.resolve_data is base.resolve_data and kind.transform_object is base.transform_object


def stream_of(value: Any) -> io.BytesIO:
    """Return a value as the stream that a planner takes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
