"""The evaluator's decisions: does Slurm take this choice, or is it the next one's turn? RES-21. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.inventory import WAITS_FOR_NODES
from resilio_hpc.slurm.client.expected_start import Expected
from resilio_hpc.slurm.submit.trial import Look

Event = Literal["passed", "would-submit", "submitted", "started", "queued", "taken-back"]
LOST = frozenset({"BOOT_FAIL", "DEADLINE", "NODE_FAIL"})  # it may have begun to start; its nodes took it down
NOW_S = 15.0
"""A start within this time is one now: clocks of two machines, and Slurm's own rounding."""


@dataclass(frozen=True)
class Patience:
    """``max_wait_s``: how long the start may lie in the future; ``settle_s``: how long Slurm may take to start a job
    for which it has room (a pass of its backfill scheduler is 30 s by default)."""

    max_wait_s: float = 0.0
    settle_s: float = 60.0


@dataclass(frozen=True)
class Attempt:
    """One line of what was tried. ``rank``: place in the ranking, from 1; ``wait_s``: until the start that Slurm
    expects, None where it expects none."""

    rank: int
    layout: str
    partition: str
    nodes: int
    gpus_per_node: int
    event: Event
    why: str
    wait_s: float | None = None
    job: str = ""


@dataclass(frozen=True)
class Verdict:
    """``act``: "go" on with this choice, "next" one, or "look" again."""

    act: Literal["go", "next", "look"]
    why: str = ""
    event: Event = "passed"


def shapes_once(choices: Sequence[Choice]) -> Iterator[tuple[int, Choice]]:
    """(rank, choice) with the best layout of each shape: Slurm's answer does not depend on the layout."""
    seen = set()
    for rank, choice in enumerate(choices, 1):
        shape = tuple(sorted(choice.sbatch_options().items()))
        if shape not in seen:
            seen.add(shape)
            yield rank, choice


def wait_s(expected: Expected, now: float) -> float | None:
    """Seconds until the start, 0 for one now; None for never."""
    if expected.start_s is None:
        return None
    left = expected.start_s - now
    return left if left > NOW_S else 0.0


def after_test(expected: Expected, now: float, patience: Patience) -> Verdict:
    """Whether a choice is worth submitting."""
    wait = wait_s(expected, now)
    if wait is None:
        return Verdict("next", expected.why or "Slurm would never start it")
    if wait > patience.max_wait_s:
        return Verdict("next", f"it would start in {wait:.0f} s, at most {patience.max_wait_s:.0f} s are acceptable")
    return Verdict("go", "it can start now" if not wait else f"it would start in {wait:.0f} s")


def must_ask(look: Look) -> bool:
    """Whether the scheduler has passed the job over, so that the test is worth another question."""
    return look.state == "PENDING" and look.reason != ""


def after_submit(
    look: Look, expected: Expected | None, now: float, since_submit_s: float, patience: Patience
) -> Verdict:
    """What a look at the submitted job means. ``expected``: a second test's answer, where there is one."""
    if look.state == "CANCELLED":
        return Verdict("go", "somebody else cancelled it", "taken-back")
    if look.state in LOST:
        return Verdict("next", f"its nodes failed: {look.state}", "taken-back")
    if look.state not in ("PENDING", "UNKNOWN"):
        return Verdict("go", f"on {look.nodes}" if look.nodes else look.state, "started")
    if expected is not None:
        verdict, wait = after_test(expected, now, patience), wait_s(expected, now)
        if verdict.act == "next":
            return Verdict("next", f"its nodes are gone: {verdict.why}", "taken-back")
        if wait:
            return Verdict("go", verdict.why, "queued")
    if since_submit_s < patience.settle_s or look.state == "UNKNOWN":
        return Verdict("look")
    if look.reason in WAITS_FOR_NODES and since_submit_s < patience.max_wait_s:
        return Verdict("go", "it waits for its turn", "queued")
    return Verdict(
        "next", f"it did not start within {since_submit_s:.0f} s: {look.reason or 'no reason'}", "taken-back"
    )
