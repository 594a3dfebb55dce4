"""A distributed optimizer's state, which lies in flat buckets, in two layouts: as it lies, or by parameter.

Megatron's optimizer, and others, put the parameters of a process into flat buckets and cut each bucket evenly between
the data-parallel ranks. As it lies (``dp_reshardable``) a bucket is one tensor of one dimension: cheap to save and to
load, with any number of data-parallel ranks. By parameter (``fully_reshardable``) each range has the coordinates of the
whole parameter, so that any other layout loads it. Neither gathers anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.slab import Slab
from resilio_hpc.core.errors import UsageError

DP_RESHARDABLE = "dp_reshardable"
FULLY_RESHARDABLE = "fully_reshardable"
_HINTS = {
    DP_RESHARDABLE: "tensor and pipeline parallel layouts, and the buckets, must be those of the save; only the number "
    "of data-parallel ranks may change"
}


@dataclass(frozen=True)
class BucketParameter:
    """A parameter of this process in a bucket: ``shape``, of its local tensor, which begins at element ``first``.

    ``name``: of the whole parameter, the same in every layout. The local tensor begins at ``start`` of one of
    ``global_shape``; without both, it is the whole one. ``replica``: other than 0 where another tensor-parallel rank
    has the same and is 0, as of norms.
    """

    name: str
    first: int
    shape: Sequence[int]
    global_shape: Sequence[int] | None = None
    start: Sequence[int] | None = None
    replica: int = 0


@dataclass(frozen=True, eq=False)
class FlatBucket:
    """This rank's shard of a bucket: elements ``first`` and on.

    ``tensors``: by name (``exp_avg``), of one dimension, all of the same length. ``parameters``: all of the bucket, in
    the order of their places. Elements behind the last one are padding, and are not saved. ``replica``: other than 0
    where another rank has the same shard and is 0.
    """

    tensors: Mapping[str, Any]
    first: int
    parameters: Sequence[BucketParameter] = field(default_factory=tuple)
    replica: int = 0


def optimizer_layouts(buckets: Sequence[FlatBucket], save: str = FULLY_RESHARDABLE) -> AnyLayout:
    """Return, for a state, the tensors of the shards; ``save``: FULLY_RESHARDABLE or DP_RESHARDABLE.

    ``save`` may change from step to step: a restore finds out which of the two a step has. Raises UsageError.
    """
    as_they_lie: dict[str, dict[str, Slab]] = {}
    by_parameter: dict[str, dict[str, FlatSlab]] = {}
    for bucket in buckets:
        _check(bucket)
        name = _name(bucket.parameters)
        if name in as_they_lie:
            raise UsageError("optimizer_layouts: two buckets have the same parameters at the same places")
        as_they_lie[name] = {key: _as_it_lies(tensor, bucket) for key, tensor in bucket.tensors.items()}
        for parameter in bucket.parameters:
            found = _by_parameter(parameter, bucket)
            if found and by_parameter.setdefault(parameter.name, found) is not found:
                raise UsageError(f"optimizer_layouts: {parameter.name} is there twice")
    return AnyLayout({DP_RESHARDABLE: as_they_lie, FULLY_RESHARDABLE: by_parameter}, save, _HINTS)


def _check(bucket: FlatBucket) -> None:
    end = 0
    for one in bucket.parameters:
        if one.first < end:
            raise UsageError(f"FlatBucket: {one.name} begins at {one.first}, before the parameter in front of it ends")
        end = one.first + prod(one.shape)
    if not bucket.parameters:
        raise UsageError("FlatBucket: no parameters")
    lengths = {tuple(tensor.shape) for tensor in bucket.tensors.values()}
    if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
        raise UsageError(f"FlatBucket: tensors of one dimension and one length, not of {sorted(map(list, lengths))}")
    if type(bucket.first) is not int or bucket.first < 0:
        raise UsageError(f"FlatBucket: first is the number of an element, not {bucket.first!r}")


def _name(parameters: Sequence[BucketParameter]) -> str:
    """Return a name that only buckets with the same content have: another layout's bucket is not taken for this one."""
    places = [
        [one.name, one.first, list(one.shape), list(one.global_shape or one.shape), list(one.start or [])]
        for one in parameters
    ]
    return "bucket-" + hashlib.sha256(repr(places).encode()).hexdigest()[:16]


def _as_it_lies(tensor: Any, bucket: FlatBucket) -> Slab:
    last = bucket.parameters[-1]
    size = last.first + prod(last.shape)
    first = min(bucket.first, size)
    # ranks whose parameters are all copies of other ranks' have a copy of their bucket
    replica = bucket.replica or min(one.replica for one in bucket.parameters)
    return Slab(tensor[: size - first], (size,), (first,), replica)


def _by_parameter(parameter: BucketParameter, bucket: FlatBucket) -> dict[str, FlatSlab]:
    """Return the range of a parameter that lies in the shard; {} if none does."""
    length = min((len(tensor) for tensor in bucket.tensors.values()), default=0)
    begin = max(parameter.first, bucket.first)
    end = min(parameter.first + prod(parameter.shape), bucket.first + length)
    if begin >= end:
        return {}
    whole = parameter.shape if parameter.global_shape is None else parameter.global_shape
    start = (0,) * len(parameter.shape) if parameter.start is None else parameter.start
    return {
        key: FlatSlab(
            tensor[begin - bucket.first : end - bucket.first], whole, begin - parameter.first, start, parameter.shape,
            bucket.replica or parameter.replica,
        )
        for key, tensor in bucket.tensors.items()
    }  # fmt: skip
