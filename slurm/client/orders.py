"""The command lines of orders to Slurm. Pure; what scontrol would misunderstand is refused here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.hostlist import compress

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_JOB = re.compile(r"\d{1,10}(?:_\d{1,10}|\+\d{1,10})?")
_KEY = re.compile(r"[A-Za-z][A-Za-z]{0,63}")


def drain(nodes: Sequence[str], reason: str) -> list[str]:
    """Let no new job start on these nodes; running jobs go on. ``reason`` replaces any other."""
    return _update_nodes(nodes, "State=DRAIN", f"Reason={_reason(reason)}")


def reword(nodes: Sequence[str], reason: str) -> list[str]:
    """Give drained nodes another reason; nodes in service are unchanged."""
    return _update_nodes(nodes, f"Reason={_reason(reason)}")


def undrain(nodes: Sequence[str]) -> list[str]:
    """End a drain, and only that: unlike RESUME this leaves a node that is DOWN as it is."""
    return _update_nodes(nodes, "State=UNDRAIN")


def weight(nodes: Sequence[str], number: int) -> list[str]:
    """Set the weight: Slurm fills nodes of a low weight first."""
    if not 0 <= number < 1 << 32:
        raise UsageError(f"a node's weight is a whole number from 0 to 4294967295, not {number}")
    return _update_nodes(nodes, f"Weight={number}")


def update_job(job: str, changes: Mapping[str, str]) -> list[str]:
    """Change a job by scontrol's names: ``{"NumNodes": "4", "TimeLimit": "60"}``."""
    bad = [key for key in changes if not _KEY.fullmatch(key) or key.lower() in ("jobid", "jobname", "stepid")]
    if bad or not changes:
        raise UsageError(f"not a field of a job that scontrol can update: {bad[0] if bad else 'nothing given'!r}")
    return [
        "scontrol",
        "update",
        f"JobId={check_job(job)}",
        *(f"{key}={_value(text)}" for key, text in changes.items()),
    ]


def check_nodes(names: Sequence[str]) -> None:
    """Raise UsageError for what is not one node's name: ALL and brackets would mean other nodes too."""
    bad = [name for name in names if not _NODE.fullmatch(name) or name.upper() == "ALL"]
    if bad:
        raise UsageError(f"not the name of a node: {printable(bad[0])!r}")


def check_job(job: str) -> str:
    """Return the job's number unchanged. Raises UsageError for anything else."""
    if not _JOB.fullmatch(job):
        raise UsageError(f"not a job's number: {printable(job)!r}; such as 42 or 42_7")
    return job


def _update_nodes(nodes: Sequence[str], *changes: str) -> list[str]:
    check_nodes(nodes)
    if not nodes:
        raise UsageError("no node is named")
    return ["scontrol", "update", f"NodeName={compress(nodes)}", *changes]


def _reason(text: str) -> str:
    if not text.strip():
        raise UsageError("a reason must say something")
    return _value(text)


def _value(text: str) -> str:
    """Return a value for scontrol, which strips a quote at the beginning or end, and prints a newline as it is."""
    if text[:1] in ('"', "'") or text[-1:] in ('"', "'") or not all(one.isprintable() for one in text):
        raise UsageError(
            f"Slurm would not keep this text as it is: {printable(text, 60)!r} (quotes at its ends, newlines)"
        )
    return text
