"""Whether the same failure has come twice, so that another restart in place does not help. Pure.

A program's own mistake comes again: a missing module, wrong arguments, the same exception at the same step. So does a
fault of a node. What follows is in the table of fault_actions.toml.
"""

from __future__ import annotations

import re

from msgspec import Struct

from resilio_hpc.launch.controller.facts.fault_actions import FaultAction, row_of
from resilio_hpc.launch.protocol.failure_class import classify
from resilio_hpc.launch.protocol.messages import RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence, place_of

SURVIVED_S = 30.0  # ranks that report no steps count as trained after so many seconds
OF_CLASS = ("exit", "signal", "corruption")  # kinds whose texts tell what kind of fault it is
WRONG_ARGUMENTS = 2  # the exit code of argparse, click and absl
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?", re.IGNORECASE)  # addresses, ports, process numbers, sizes


_THIRD = {FaultAction.STOP: "", FaultAction.STOP_ELSEWHERE: "device", FaultAction.MOVE: "move"}
"""How a line of ``to_text`` says what follows; the first two as versions before this table wrote them."""


class Repeatable(Struct, frozen=True):
    """A failure that may repeat.

    ``what`` is compared; ``place``: node and local rank; ``again``: what is done when it comes again.
    """

    what: str
    place: str = ""
    again: FaultAction = FaultAction.STOP

    def is_again(self, before: Repeatable) -> bool:
        """Return whether this is the same failure as before, and the program's own."""
        if self.what != before.what or self.again is FaultAction.MOVE:
            return False
        return self.again is FaultAction.STOP or self.place != before.place

    def moves_after(self, before: Repeatable | None) -> bool:
        """Return whether this is the same fault of the same node as before."""
        same = before is not None and self.what == before.what and self.place.split()[0] == before.place.split()[0]
        return same and self.again is FaultAction.MOVE

    def to_text(self) -> str:
        """Return one line, for the next controller."""
        return "\t".join((self.what, self.place, _THIRD[self.again]))

    @classmethod
    def from_text(cls, text: str) -> Repeatable | None:
        """Return the failure of a line that ``to_text`` wrote; None for any other text."""
        parts = text.split("\t")
        known = {third: action for action, third in _THIRD.items()}
        return cls(parts[0], parts[1], known[parts[2]]) if len(parts) == 3 and parts[2] in known else None


def repeatable(failure: RankFailure, step: int, survived: bool) -> Repeatable | None:
    """Return the mark of a failure; None where a restart may help, however often.

    ``step``: the most steps that any rank had completed, -1 for none or unknown. ``survived``: ranks that report no
    steps had run for ``SURVIVED_S``.
    """
    place = f"{failure.node} {failure.local_rank}"
    if failure.kind == "early_exit":
        return Repeatable(f"{failure.message} at {step}", place)
    if failure.kind not in OF_CLASS or is_consequence(failure):
        return None
    found = classify(failure)
    again = row_of(found).again
    if again is FaultAction.MOVE:
        return Repeatable(found.pattern, place, again)
    if failure.kind != "exit":
        return None
    if failure.exit_code == WRONG_ARGUMENTS and not failure.traceback and (again.stops or not found.pattern):
        return Repeatable(f"exit code {WRONG_ARGUMENTS} at {step}", place)
    if not again.stops:
        return None
    raised = failure.message.partition(":")[0].strip()
    if failure.traceback and raised in ("ImportError", "ModuleNotFoundError"):
        return Repeatable(f"{_plain(failure.message)} at {step}", place)
    if not failure.traceback or survived:
        return None
    frames = [line.strip() for line in failure.traceback.splitlines() if line.lstrip().startswith('File "')]
    where = frames[-1] if frames else ""
    return Repeatable(f"{_plain(failure.message)} {where} at {step}", place, again)


def again_reason(failure: RankFailure) -> str:
    """Return the verdict's reason where a failure has come again."""
    what = (failure.message.strip().splitlines() or [""])[0]
    place = f" at {place_of(failure.traceback)}" if place_of(failure.traceback) else ""
    code = f", exit code {failure.exit_code}" if failure.exit_code else ""
    return f"the same failure again, so that another restart does not help: {what}{place}{code}"


def may_move(failure: RankFailure) -> bool:
    """Return whether the node may be at fault, so that a spare should stand in for it."""
    if failure.kind not in OF_CLASS:
        return False
    row = row_of(classify(failure))
    return FaultAction.MOVE in (row.first, row.again)


def _plain(message: str) -> str:
    """Return the first line without numbers and addresses, which differ each time."""
    return _CHANGING.sub("#", " ".join((message.strip().splitlines() or [""])[0].split()))[:500]
