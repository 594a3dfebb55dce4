"""What kind of fault ended a rank, by its error and the line of its log that its agent sent. Pure.

A line that shows a device or a disk to be at fault beyond doubt decides. Else it is what ``diagnose.causes.judge`` says
of the error and that line; an exception that the table does not know is the program's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from resilio_hpc.diagnose.causes.judge import judge_lines
from resilio_hpc.diagnose.causes.known_faults import fault_in
from resilio_hpc.diagnose.causes.pattern_table import CauseClass, FaultOf, find
from resilio_hpc.launch.protocol.message_parts import RankFailure

MEMORY_OF_OTHERS = "gpu.memory-of-others"
_GIB = {"KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}
_CAPACITY = re.compile(r"total capacity of ([\d.]+) ([KMGT]iB)")
_OTHERS = re.compile(r"Process \d+ has ([\d.]+) ([KMGT]iB) memory in use")  # torch asks NVML for them


class FailureClass(NamedTuple):
    """``pattern``: the name of the table's entry; "" without one. ``says``: what it means, for a person."""

    cause: CauseClass
    pattern: str = ""
    says: str = ""


UNKNOWN = FailureClass(CauseClass.UNKNOWN)


def classify(failure: RankFailure) -> FailureClass:
    """Return the class of a rank's failure."""
    text = f"{failure.message}\n{failure.log}"
    for fault in (FaultOf.DEVICE, FaultOf.DISK):
        sure = fault_in(f"{text}\n{failure.traceback}" if fault is FaultOf.DEVICE else text, fault)
        if sure is not None:
            return FailureClass(sure[0].cause, sure[0].name, sure[0].says)
    found = class_of(text)
    if not found.pattern and failure.traceback:
        return FailureClass(CauseClass.USER_CODE, "", "an exception of the program")
    if found.cause is CauseClass.OOM_GPU and held_by_others(text):
        return FailureClass(CauseClass.OOM_GPU, MEMORY_OF_OTHERS, "other processes hold most of the GPU's memory")
    return found


def class_of(text: str) -> FailureClass:
    """Return what the lines of a text show; where only echoes are left, the first of them."""
    lines = text.splitlines()
    cause = judge_lines(lines)
    if cause.root is not None:
        return FailureClass(cause.label, cause.root.pattern.name, cause.evidence)
    echo = next((pattern for line in lines if (pattern := find(line.strip())) is not None), None)
    return UNKNOWN if echo is None else FailureClass(CauseClass.UNKNOWN, echo.name, echo.says)


def held_by_others(text: str) -> bool:
    """Return whether torch's error says that other processes hold more than half of the GPU's memory."""
    capacity = _CAPACITY.search(text)
    if capacity is None:
        return False
    held = sum(float(found[1]) * _GIB[found[2]] for found in _OTHERS.finditer(text))
    return held > float(capacity[1]) * _GIB[capacity[2]] / 2
