"""The last lines of a launch: how it ended, the first failure (DLR-4), and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event, read_ledger
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.failure_text import exit_words
from resilio_hpc.events.phrases import plural, seconds

MAX_TRACEBACK_LINES = 40


class Ending(Struct, frozen=True):
    """The text for a verdict: ``title``, and ``advice`` for when no job carries on by itself."""

    title: str
    advice: str
    resumable: bool = False  # a next job carries on


# {resume}: how to start again; {ledger}, {console}: where to look
ENDINGS = {
    "completed": Ending("completed", ""),
    "time_limit": Ending("stopped before the time limit", "{resume}", True),
    "needs_new_job": Ending("this job cannot go on", "{resume}", True),
    "terminated": Ending("terminated", "{resume}", True),
    "interrupted": Ending("interrupted", "{resume}"),
    "cancelled": Ending("cancelled", "{resume}"),
    "failed": Ending("failed", "put the first failure right, then {resume}"),
    "no_progress": Ending("gave up", "put the first failure right, then {resume}"),
    "not_enough_nodes": Ending(
        "not enough nodes", "lower --nnodes MIN, add --spares, or ask for other nodes; then {resume}"
    ),
    "agents_lost": Ending(
        "the agents were lost", "find out why they ended (the lines above; with --view {console}), then {resume}"
    ),
}
UNKNOWN = Ending("ended", "see {ledger}")


class Losses(Struct, frozen=True):
    """The cost of failures. ``time_s``: from each failure to the first step after it; ``steps``: steps done again.

    ``echoes``: ranks that ended last with an error that reads like an echo of another one's end.
    """

    restarts: int = 0
    time_s: float = 0.0
    steps: int = 0
    echoes: int = 0


def losses(events: list[Event], job: str = "") -> Losses:
    """Return the losses of a job (of all jobs: ""), from the ledger. Pure."""
    ours = [event for event in events if event.writer.startswith(f"{job}-" if job else "")]
    recoveries = [Fields(event.fields) for event in ours if event.kind == "recovered"]
    planned = sum(event.kind == "regroup" for event in ours)
    return Losses(
        max(0, sum(event.kind == "start" for event in ours) - 1 - planned),
        sum(fields.number("recovery_s") or 0.0 for fields in recoveries),
        sum(fields.whole("lost_steps") or 0 for fields in recoveries),
        sum(Fields(event.fields).whole("echoes") or 0 for event in ours if event.kind == "agent_ends"),
    )


def verdict_lines(
    run_path: Path, verdict: Mapping[str, Any], successor: str | None = None, lost: Losses | None = None
) -> list[str]:
    """Return what the user reads at the end. Pure."""
    f = Fields(verdict)
    name = f.text("verdict")
    ending = ENDINGS.get(name, UNKNOWN)
    reason = printable(f.text("reason"), 500)
    lines = [f"{ending.title}: {reason}" if reason else ending.title]
    if f.inner("first_failure").data:
        lines += failure_lines(f.inner("first_failure"))
        lines += _echoes(f.inner("first_failure"), lost or Losses())
    lines += _cost(lost or Losses())
    going_on = _going_on(f.whole("committed"), f.data.get("steps_reported"))
    if successor and ending.resumable:
        unless = ", unless this one was cancelled" if name == "terminated" else ""
        lines.append(f"next: job {successor} {going_on}, by itself{unless}")
    elif ending.advice:
        places = {
            "resume": f"start it again with --run-dir {run_path}; it {going_on}",
            "ledger": f"resilio ledger {run_path}",
            "console": f"{run_path}/console.log",
        }
        lines.append(f"next: {ending.advice.format(**places)}")
    if name != "completed":
        lines.append(f"see: resilio ledger {run_path} for what happened, {run_path}/logs for the ranks' output")
    return lines


def _going_on(committed: int | None, steps_reported: object = True) -> str:
    if committed is None:
        return "carries on from the newest committed checkpoint"
    if committed < 0 and steps_reported is False:
        return "goes on from what the script itself has saved, if it has"
    if committed < 0:
        return "begins anew, since no checkpoint is committed"
    return f"carries on from step {committed}"


def _echoes(failure: Fields, lost: Losses) -> list[str]:
    """Return how many ranks' tracebacks the console leaves out. Pure."""
    count = lost.echoes - (failure.data.get("echo") is True)
    if count <= 0:
        return []
    what = "lost a connection, or timed out, like it" if failure.data.get("echo") else "lost the connection to it"
    return [f"{plural(count, 'peer')} {what}: the logs say where"]


def _cost(lost: Losses) -> list[str]:
    if not lost.restarts:
        return []
    text = f"cost of failures: {plural(lost.restarts, 'restart')}"
    if lost.time_s:
        text += f", {seconds(lost.time_s)} until training went on"
    if lost.steps:
        text += f", {plural(lost.steps, 'step')} done again"
    return [text]


def failure_lines(failure: Fields) -> list[str]:
    """Return the first failure: rank, node, end, time, message, traceback. Pure."""
    when = local_time(failure.time("time"))
    traceback = [printable(line, 500) for line in failure.text("traceback").rstrip().splitlines()]
    message = [printable(line, 500) for line in failure.text("message").strip().splitlines()[:5]]
    how = exit_words(failure)
    if not traceback and message and how in message[0]:  # the launcher's own message has it already
        how = message.pop(0)
    head = (
        f"first failure: rank {failure.data.get('rank')} (local rank {failure.data.get('local_rank')}) on "
        f"{failure.text('node', '?')} at {when}: {how}"
    )
    if traceback:  # the message is the traceback's last line
        skipped = len(traceback) - MAX_TRACEBACK_LINES
        told = [f"… {plural(skipped, 'line')} before"] if skipped > 0 else []
        told += traceback[-MAX_TRACEBACK_LINES:]
    else:
        told = message
    return [printable(head, 500), *(f"    {line}" for line in told)]


def last_words(run_path: Path, verdict: Mapping[str, Any], job: str, successor: str | None) -> list[str]:
    """Return ``verdict_lines`` with the job's losses from the ledger."""
    return verdict_lines(run_path, verdict, successor, losses(read_ledger(run_path / "ledger"), job))


def show(lines: list[str]) -> None:
    """Print the last words to standard error."""
    sys.stderr.write("".join(f"[resilio] {line}\n" for line in lines))
    sys.stderr.flush()
