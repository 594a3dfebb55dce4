"""What a rank found of a step's result: the same words from the rank to the ledger."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

StepVerdict = Literal["transient", "persistent", "deterministic", "corrupt", "unresolved", "noise"]
"""Of a suspect result: it did not come again; it comes again on that rank's device alone; it comes again on other
devices, too; it came of a rank's parameters, which were not those of its replicas, and were copied from another one; it
came again, and no other device could be asked. noise: of a sampled step, which is done twice."""

_Number = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 53)]
_Line = Annotated[str, msgspec.Meta(max_length=300)]


class Judgement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict on the result of the step that would be number ``step``.

    ``rank``: persistent and corrupt, the rank to blame; deterministic, the rank whose samples give it; transient, the
    rank whose own result did not come again; -1 where that is not known. ``signal``: what was wrong. ``samples``: what
    the program says of its samples. ``module``: the first module with a value that is not finite, or the corrupt
    tensor. ``device``: of that rank.
    ``tries``: how often the step was computed. ``difference``: relative, of two results that should be equal; on the
    same device, for noise, where ``peer_difference`` is that of two devices; -1: not measured.
    """

    step: _Number
    verdict: StepVerdict
    rank: _Number = -1
    signal: _Line = ""
    samples: _Line = ""
    module: _Line = ""
    device: _Line = ""
    tries: _Number = 1
    difference: Annotated[float, msgspec.Meta(ge=-1.0, le=1e300)] = -1.0
    peer_difference: Annotated[float, msgspec.Meta(ge=-1.0, le=1e300)] = -1.0
