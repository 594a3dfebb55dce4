"""The syntax of values of sbatch's options. Pure: each function returns the value as sbatch takes it.

Forms: sbatch(1) of Slurm 22.05 to 26.05. A value that sbatch would refuse, or misunderstand, is refused here, with what
to write instead; what only a site knows (does the partition exist?) is left to sbatch.
"""

from __future__ import annotations

import re
from functools import partial

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.hostlist import expand

_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}", re.ASCII)
_SIGNAL = re.compile(r"(?:[RB]:)?(?:[A-Z][A-Z0-9]*|\d{1,2})(?:@\d{1,5})?", re.ASCII)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%[1-9]\d*)?", re.ASCII)
_MOMENT = re.compile(r"[\w:+/.-]+", re.ASCII)
_match = partial(re.fullmatch, flags=re.ASCII)  # \d also matches digits of other scripts, which sbatch does not know
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")


def text(value: str) -> str:
    """Return any text that fits on a line."""
    if not value:
        raise UsageError("it is empty")
    return line(value)


def line(value: str) -> str:
    """Return any text that fits on a line, and "". A #SBATCH line ends with its line: a break cannot be written."""
    if not value.isprintable():
        raise UsageError(f"{value!r} holds a line break or a control character, which #SBATCH lines cannot")
    return value


def word(value: str) -> str:
    """Return a name or a list of names, without spaces."""
    if re.search(r"\s", text(value)):
        raise UsageError(f"{value!r} holds a space, and such names have none")
    return value


def hosts(value: str) -> str:
    """Return a host list (``n[1-3,7]``), or the path of a file of names."""
    if "/" not in word(value):
        expand(value)
    return value


def count(value: str) -> str:
    """Return a whole number from 1."""
    if not _match(r"[1-9]\d{0,8}", value):
        raise UsageError(f"{value!r} is not a whole number from 1")
    return value


def count_or_none(value: str) -> str:
    """Return a whole number from 0."""
    if not _match(r"0|[1-9]\d{0,8}", value):
        raise UsageError(f"{value!r} is not a whole number from 0")
    return value


def whole(value: str) -> str:
    """Return a whole number, negative too."""
    if not _match(r"-?\d{1,9}", value):
        raise UsageError(f"{value!r} is not a whole number")
    return value


def nodes(value: str) -> str:
    """Return ``4``, or ``2-4``: as many as Slurm can give."""
    found = _match(r"([1-9]\d{0,6})(?:-([1-9]\d{0,6}))?", value)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"{value!r} is neither a number of nodes (4) nor a range (2-4)")
    return value


def gpus(value: str) -> str:
    """Return ``8``, ``h100:8``, ``0``: none."""
    if not _match(r"(?:[A-Za-z][\w.-]*:)?(?:0|[1-9]\d{0,3})(?:,[A-Za-z][\w.-]*:[1-9]\d{0,3})*", value):
        raise UsageError(f"{value!r} is neither a number of GPUs (8) nor of a type (h100:8)")
    return value


def time(value: str) -> str:
    """Return ``90`` (minutes), ``MM:SS``, ``HH:MM:SS``, ``DAYS-HH[:MM[:SS]]``, ``UNLIMITED``."""
    if value.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return "UNLIMITED"
    if not _TIME.fullmatch(value):
        raise UsageError(f"{value!r} is not a time limit: write minutes (90), HH:MM:SS or DAYS-HH:MM:SS")
    if not any(int(part) for part in re.split("[-:]", value)):
        raise UsageError(f"{value!r} is no time at all (for no limit: UNLIMITED)")
    return value


def memory(value: str) -> str:
    """Return ``500`` (MiB), ``64G``, ``64GB``; ``0``: all of the node's."""
    if not _match(r"\d{1,12}([KMGT]B?)?", value, flags=re.ASCII | re.IGNORECASE):
        raise UsageError(f"{value!r} is not an amount of memory: write 500M, 64G, or 0 for all of a node's")
    return value


def signal(value: str) -> str:
    """Return ``USR2@120``, ``B:USR1@60``."""
    plain = value.upper().replace("SIG", "", 1) if value.upper().startswith(("SIG", "B:SIG")) else value.upper()
    if not _SIGNAL.fullmatch(plain):
        raise UsageError(f"{value!r} is not a warning signal: write USR2@120, or B:USR1@120 for the batch script")
    return plain


def array(value: str) -> str:
    """Return ``0-7``, ``1,3,5``, ``0-99:10``, with ``%4``: four at a time."""
    if not _ARRAY.fullmatch(value):
        raise UsageError(f"{value!r} is not a list of tasks: write 0-7, 1,3,5 or 0-99%4 (four at a time)")
    ranges = [part.split("-") for part in re.sub(r"%\d+|:\d+", "", value).split(",") if "-" in part]
    for first, last in ranges:
        if int(last) < int(first):
            raise UsageError(f"{value!r}: {first}-{last} is no task at all")
    return value


def moment(value: str) -> str:
    """Return ``2026-11-22T20:00``, ``now+1hour``, ``16:00``, ``tomorrow``."""
    if not _MOMENT.fullmatch(value):
        raise UsageError(f"{value!r} is not a time: write 2026-11-22T20:00, 16:00 or now+1hour")
    return value


def switch(value: str) -> str:
    """Return ``true`` or ``false``, as given."""
    if value.lower() in TRUE:
        return "true"
    if value.lower() in FALSE:
        return "false"
    raise UsageError(f"{value!r}: write true or false")


def ranks(value: str) -> str:
    """Return what resilio-launch's --nproc-per-node takes."""
    if value not in ("gpu", "cpu", "xpu", "auto"):
        try:
            return count(value)
        except UsageError:
            raise UsageError(f"{value!r} is neither a number of ranks nor one of gpu, cpu, xpu, auto") from None
    return value


def pmi(value: str) -> str:
    """Return a type of srun --mpi."""
    if not _match(r"[a-z][a-z0-9_]*", value) or value == "none":
        raise UsageError(f"{value!r} is no type of PMI: srun --mpi=list names those of this Slurm (pmix, pmi2)")
    return value
