"""How a rank ended, as text. Pure, and safe for any fields."""

from __future__ import annotations

import signal as signals

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.events.phrases import seconds


def signal_name(number: int | None) -> str:
    """Return ``SIGKILL`` for 9; ``signal 77`` for a number without a name."""
    try:
        return signals.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def exit_words(failure: Fields) -> str:
    """Return how a rank ended: ``killed by SIGKILL``, ``exit code 1``."""
    number, code = failure.whole("signal"), failure.whole("exit_code")
    if failure.text("kind") == "hang":
        return "a hang"
    if failure.text("kind") == "corruption":
        return "silent corruption"
    if number is not None:
        return f"killed by {signal_name(number)}"
    return f"exit code {code}" if code is not None else "unknown end"


def late_end(f: Fields, how: str, then: str) -> str:
    """Return one line about a rank's process that has not ended though its program is over."""
    who = f"rank {f.whole('rank')} on {f.text('node', '?')} (process {f.whole('pid')})"
    return f"{who} {how} {seconds(f.number('waited_s'))} ago and has not ended: {then}"


_BLOWS = {
    "kill_rank": "SIGKILL for {}", "abort_rank": "SIGABRT for {}", "stop_rank": "SIGSTOP for {}",
    "kill_agent": "SIGKILL for the agent on {}", "kill_controller": "SIGKILL for the controller's agent on {}",
}  # fmt: skip


def drill(f: Fields) -> str:
    """Return a drill of a live run: what is done on purpose, or why it is not."""
    node, rank, fault = f.text("node", "?"), f.whole("rank"), f.text("fault", "?")
    whom = f"rank {rank} on {node}" if fault.endswith("_rank") and rank is not None else node
    by = f" by {f.text('by')}" if f.text("by") else ""
    done = _BLOWS[fault].format(whom) if fault in _BLOWS else f"{printable(fault, 60)} on {whom}"
    if f.text("why"):
        return f"a drill was ordered{by} and not done: {f.text('why')}"
    return f"a drill, ordered{by}: {done}"


def rank_failed(f: Fields) -> str:
    """Return one line about a failed rank, with the line of its program that raised the error."""
    who = f"rank {f.data.get('rank')} on {f.text('node', '?')}"
    how, message = exit_words(f), (f.text("message").strip().splitlines() or [""])[0]
    if how == "a hang":
        return f"hang on {f.text('node', '?')}: {message or who}"
    if how == "silent corruption":
        return f"silent corruption on {f.text('node', '?')}: {message or who}"
    if how in message:  # the launcher's own message has it already: "failed (…), exit code 1"
        return f"{who} {message}"
    how += f" at {f.text('place')}" if f.text("place") else ""
    verb = "ended with exit code" if how.startswith("exit code") else how
    said = how.replace("exit code", verb) if how.startswith("exit code") else how
    if how == "unknown end":
        said = "could not be started" if f.text("kind") == "spawn" else "is lost"
    return f"{who} {said}{': ' if message else ''}{message}"
