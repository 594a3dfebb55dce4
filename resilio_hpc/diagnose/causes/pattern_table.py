"""The patterns of patterns.toml: what lines of logs mean."""

from __future__ import annotations

import enum
import functools
import re
from importlib import resources
from typing import Annotated

import msgspec

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.diagnose.causes.pattern_index import PatternIndex


class CauseClass(enum.Enum):
    """Whose fault a failure is."""

    USER_CODE = "user_code"
    LAUNCH_CONFIG = "launch_config"
    OOM_HOST = "oom_host"
    OOM_GPU = "oom_gpu"
    GPU_HARDWARE = "gpu_hardware"
    NIC_NETWORK = "nic_network"
    STORAGE = "storage"
    SOFTWARE_STACK = "software_stack"
    SLURM = "slurm"
    DATA = "data"
    UNKNOWN = "unknown"


class LineRole(enum.Enum):
    """What a line is in a chain of failures."""

    ROOT = "root"
    EITHER = "either"
    ECHO = "echo"
    HINT = "hint"


class FaultOf(enum.Enum):
    """What a line shows to be at fault beyond doubt: no program causes it."""

    DEVICE = "device"
    DISK = "disk"
    PEER = "peer"


class FailurePattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the table. ``sure``: probability that the class is right where this line is the root."""

    name: str
    text: str
    cause: CauseClass = msgspec.field(name="class")
    role: LineRole
    sure: Annotated[float, msgspec.Meta(ge=0, le=1)]
    says: str
    source: str
    fault: FaultOf | None = None


class PatternTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. ``todo``: what a person does about a failure of each class. ``failure``: words of a failure."""

    todo: dict[CauseClass, str]
    pattern: list[FailurePattern]
    hint: list[FailurePattern] = []
    failure: str = "$^"


def parse(text: str) -> PatternTable:
    """Return a table. Raises ResilioError where it is wrong."""
    try:
        table = msgspec.convert(tomllib.loads(text), PatternTable)
        for text in (table.failure, *(one.text for one in table.pattern + table.hint)):
            re.compile(text)
    except (ValueError, re.error) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise ResilioError(f"table of failure patterns: {error}") from None
    return table


@functools.cache
def shipped() -> PatternTable:
    """Return the table that comes with the package."""
    return parse(resources.files(__package__).joinpath("patterns.toml").read_text(encoding="utf-8"))


@functools.cache
def _index() -> PatternIndex:
    return PatternIndex([pattern.text for pattern in shipped().pattern])


def find(statement: str) -> FailurePattern | None:
    """Return the first pattern that fits what a line states (`log_line.stated`)."""
    number = _index().first(statement)
    return None if number is None else shipped().pattern[number]


@functools.cache
def _words(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


def guess(statement: str) -> FailurePattern | None:
    """Return what the words of a line speak of that tells of a failure; None where it tells of none."""
    if not _words(shipped().failure).search(statement):
        return None
    return next((hint for hint in shipped().hint if _words(hint.text).search(statement)), None)
