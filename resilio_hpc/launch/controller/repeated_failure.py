"""Whether the same failure has come twice, so that another restart does not help. Pure.

A program's own mistake comes again: a missing module, wrong arguments, the same exception at the same step. So does a
broken GPU, node, network or file system, for which restarts and spares exist: a failure that reads like one of those is
never counted as the program's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from resilio_hpc.launch.gpus.device_errors import hardware_error
from resilio_hpc.launch.protocol.messages import RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence

SURVIVED_S = 30.0  # ranks that report no steps count as trained after so many seconds
WRONG_ARGUMENTS = 2  # the exit code of argparse, click and absl
# Messages of the C library (errno(3)), of Lustre and NFS clients, and of network libraries. No program causes them.
_NOT_THE_PROGRAMS = re.compile(
    r"input/output error|remote i/o|stale file handle|transport endpoint|no space left|quota exceeded"
    r"|read-only file system|structure needs cleaning|host is down|no route to host|network is (unreachable|down)"
    r"|timed out|time-?out|connection (refused|reset|aborted|closed|error)|broken pipe|name resolution"
    r"|name or service not known|temporarily unavailable|cannot allocate memory|address already in use"
    r"|device or resource busy|bus error|killed by signal|exited unexpectedly|service unavailable|too many requests"
    r"|bad gateway|ssl|uncorrectable|nvlink|pcie",
    re.IGNORECASE,
)
# Messages about a device. Program or device may be at fault, so a second device must report the same.
_OF_A_DEVICE = re.compile(r"\b(cuda|cudnn|cublas|cufft|nccl|hip|rccl|miopen|xpu|device-side)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile("out of memory", re.IGNORECASE)
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)  # addresses, ports, process numbers, sizes


@dataclass(frozen=True)
class Repeatable:
    """A failure that may repeat: ``what`` is compared, with its place; ``device``: the fault may be that device's."""

    what: str
    place: str = ""
    device: bool = False

    def is_again(self, before: Repeatable) -> bool:
        """Return whether this is the same failure as before, and the program's own."""
        return self.what == before.what and not (self.device and self.place == before.place)

    def to_text(self) -> str:
        """Return one line, for the next controller."""
        return "\t".join((self.what, self.place, "device" if self.device else ""))

    @classmethod
    def from_text(cls, text: str) -> Repeatable | None:
        """Return the failure of a line that ``to_text`` wrote; None for any other text."""
        parts = text.split("\t")
        return cls(parts[0], parts[1], bool(parts[2])) if len(parts) == 3 else None


def repeatable(failure: RankFailure, step: int, survived: bool) -> Repeatable | None:
    """Return the mark of a failure; None where a restart may help.

    ``step``: the most steps that any rank had completed, -1 for none or unknown. ``survived``: ranks that report no
    steps had run for ``SURVIVED_S``.
    """
    if failure.kind == "early_exit":
        return Repeatable(f"{failure.message} at {step}")
    text = f"{failure.message}\n{failure.traceback}"
    if failure.kind != "exit" or is_consequence(failure) or hardware_error(text):
        return None
    if _NOT_THE_PROGRAMS.search(failure.message):
        return None
    raised = failure.message.partition(":")[0].strip()
    if failure.traceback and raised in ("ImportError", "ModuleNotFoundError"):
        return Repeatable(f"{_plain(failure.message)} at {step}")
    if failure.exit_code == WRONG_ARGUMENTS and not failure.traceback:
        return Repeatable(f"exit code {WRONG_ARGUMENTS} at {step}")
    if not failure.traceback or survived:
        return None
    device = bool(_OF_A_DEVICE.search(failure.message)) and not _OUT_OF_MEMORY.search(failure.message)
    frames = [line.strip() for line in failure.traceback.splitlines() if line.lstrip().startswith('File "')]
    where = frames[-1] if frames else ""
    return Repeatable(f"{_plain(failure.message)} {where} at {step}", f"{failure.node} {failure.local_rank}", device)


def _plain(message: str) -> str:
    """Return the first line without numbers and addresses, which differ each time."""
    return _CHANGING.sub("#", " ".join((message.strip().splitlines() or [""])[0].split()))[:500]
