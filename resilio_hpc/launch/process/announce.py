"""What a launch prints while it runs: one plain line for each event that matters at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.process.stderr_writer import PatientStream

_stream = PatientStream()

ANNOUNCED = frozenset({
    "waiting", "round", "rank_failed", "first_failure", "echoes", "node_lost", "decision", "recovered", "slow_start",
    "persist_failed", "save_overdue", "save_resumed", "stalled", "hang", "goes_on", "last_save", "stopping",
    "stop_overdue", "agent_left", "memory_alert", "node_returned", "regroup", "suspended", "resumed", "notify_failed",
    "limits_set", "node_unfit", "environment_short", "environment_differs", "paused", "tested", "pause_ended",
    "slow", "slow_over", "restarts_all", "digests_differ", "result_judged",
})  # fmt: skip


def announcement(kind: str, fields: Mapping[str, Any]) -> str:
    """Return the line for a ledger entry; "" for entries that only the ledger needs. Pure."""
    if kind == "rank_failed" and fields.get("echo") and not fields.get("alone"):
        return ""  # the controller waits for its cause: "first_failure" or "echoes" tell of it then
    if kind == "hang" and fields.get("acted") and fields.get("ranks"):
        return ""  # "rank_failed" tells of it
    restoring = kind == "start" and bool(Fields(fields).text("restore")) and fields.get("acted", True)
    return words(kind, fields) if restoring or kind in ANNOUNCED else ""


def stamped(line: str, now: float | None = None) -> str:
    """Return ``[resilio] 14:03:22 line``, in local time."""
    return f"[resilio] {time.strftime('%H:%M:%S', time.localtime(now))} {line}"


def say(line: str) -> None:
    """Print one line for the user on standard error.

    It is one write, since agents of several nodes share the stream. The caller does not wait while the stream hangs.
    """
    _stream.write(stamped(line) + "\n")


def finish(limit_s: float | None = None) -> None:
    """Wait until all lines are written, for ``limit_s`` at most."""
    _stream.flush(limit_s)
