"""The audit log of drains: one line of JSON for each intention and each outcome, appended, never rewritten.

A node may be drained for its broken disk. So a child with a time limit writes the log, and a log that cannot be written
is reported and does not stop a drain.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import Completed, run

DEFAULT_PATH = Path("/var/log/resilio/drain.jsonl")
PATH_VARIABLE = "RESILIO_DRAIN_LOG"
_TIMEOUT_S = 2.0


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry. ``step``: "intent" before a write, "outcome" after it or instead of it. ``time``: Unix seconds."""

    time: float
    step: str
    act: str
    node: str
    mode: str
    result: str = ""
    why: str = ""
    check: str = ""
    evidence: str = ""
    state_before: str = ""
    reason_before: str = ""
    by_before: str = ""
    reason_written: str = ""
    state_after: str = ""
    reason_after: str = ""
    host: str = ""
    user_id: int = -1
    pid: int = 0
    version: int = 1


class AuditLog:
    """The log. ``path``: None keeps no log (dry runs)."""

    def __init__(self, path: Path | None, run: Callable[..., Completed] = run) -> None:
        self._path = path
        self._run = run
        self.problem = ""

    def record(self, entry: AuditEntry) -> None:
        """Append one entry; after a failure, ``problem`` tells it, and no more is tried."""
        if self._path is None or self.problem:
            return
        stamped = msgspec.structs.replace(entry, host=os.uname().nodename, user_id=os.geteuid(), pid=os.getpid())
        line = msgspec.json.encode(stamped).decode() + "\n"
        try:
            self._append(line)
        except CommandError as error:
            self.problem = f"the audit log could not be written: {error}"

    def _append(self, line: str) -> None:
        append = ["tee", "-a", "--", str(self._path)]
        try:
            self._run(append, _TIMEOUT_S, stdin=line)
        except CommandError as error:
            if error.returncode is None:  # it hangs, and would hang again
                raise
            self._run(["mkdir", "-p", "-m", "0755", "--", str(self._path and self._path.parent)], _TIMEOUT_S)
            self._run(append, _TIMEOUT_S, stdin=line)
