"""Drills of a live run: what may be done to it, whom it meets, and what became of it. Pure.

Only processes of the run itself are hurt, by its own agents, and only where the run can be expected to come over it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.drills.drill_words import is_live, slug
from resilio_hpc.drills.kind import Drill
from resilio_hpc.events.failure_text import drill as said_of
from resilio_hpc.report.overview import Overview
from resilio_hpc.report.status import Status

NOT_COMPARED = "not checked: this run does not compare its replicas (docs/validation.md)"


@dataclass(frozen=True)
class LivePlan:
    """One drill of a live run. ``fault``: as the controller knows it; ``rank``: of whose node, at least."""

    drill: str
    fault: str
    node: str
    rank: int

    @property
    def text(self) -> str:
        """Return it in words."""
        said = said_of(Fields({"fault": self.fault, "node": self.node, "rank": self.rank}))
        return said.partition(": ")[2]


@dataclass(frozen=True)
class LiveResult:
    """What became of it. Times in seconds; None: not known. ``state``: what is known of the ranks' values."""

    name: str
    passed: bool
    why: str
    fault: str
    node: str
    rank: int
    time: float
    recovery_s: float | None = None
    detection_s: float | None = None
    repeated_steps: int | None = None
    kind: str = ""
    went_on_to: int | None = None
    state: str = NOT_COMPARED


def refusal(overview: Overview, directory_owner: int, me: int, force: bool) -> str:
    """Return why no drill may be done to a run; "" where one may. The controller looks again, at its own moment."""
    if directory_owner != me:
        return f"{overview.path} belongs to another user (uid {directory_owner}): drills are for one's own runs"
    if overview.state == "ended":
        verdict = overview.verdict.verdict.replace("_", " ") if overview.verdict is not None else "?"
        return f"the run has ended ({verdict})"
    if overview.state == "stale":
        return f"nothing was heard of the run for {overview.silent_s or 0.0:.0f} s: does it run?"
    status = overview.status
    if overview.state != "running" or status is None:
        return (
            "the run does not train now: it starts, or recovers from a fault; try again when resilio view shows steps"
        )
    if status.stalled_s is not None:
        return f"the run stands still: no step was done for {status.stalled_s:.0f} s"
    if status.committed is None and not force:
        return "no checkpoint is committed yet, so all steps would be lost: resilio checkpoint, or --force"
    return ""


def plan(drill: Drill, status: Status, rank: int | None, draw: random.Random) -> LivePlan:
    """Return whom the drill meets. Raises UsageError where it is not for live runs, or there is no such rank."""
    name = slug(drill.full_name)
    if not is_live(drill):
        raise UsageError(f"{name} is not for a live run: it would hurt more than the run's own processes, or needs "
                         "a script of its own; resilio drill list --where live shows those that are")  # fmt: skip
    act = drill.acts[0]
    training = [node for node in status.nodes if node.role == "training" and node.first_rank is not None and node.ranks]
    fault = "kill_controller" if (act.do, act.to) == ("kill_agent", "leader") else act.do
    others = [node for node in training if node.node != status.controller] or training
    wanted = [node for node in training if node.node == status.controller] if fault == "kill_controller" else others
    if rank is not None:
        wanted = [node for node in training if node.first_rank is not None and
                  node.first_rank <= rank < node.first_rank + node.ranks]  # fmt: skip
        if not wanted or (fault == "kill_controller" and wanted[0].node != status.controller):
            raise UsageError(f"there is no rank {rank} in the run now, or not where {name} strikes")
    if not wanted:
        raise UsageError("no rank of the run trains now")
    node = draw.choice(wanted)
    first = node.first_rank or 0
    return LivePlan(name, fault, node.node, rank if rank is not None else first + draw.randrange(node.ranks))


def struck(events: Sequence[Event], mark: str) -> Event | None:
    """Return the line of the drill with this mark."""
    return next((event for event in events if event.kind == "drill" and event.fields.get("asked") == mark), None)


def over(events: Sequence[Event]) -> Event | None:
    """Return the line that ends the recovery; ``events`` from the drill on. A verdict ends it, too."""
    return next((event for event in events if event.kind in ("recovered", "rank_restarted", "verdict")), None)


def result_of(plan: LivePlan, at: float, end: Event | None, state: str, world: tuple[int, int], step: int | None,
              before: int | None) -> LiveResult:  # fmt: skip
    """Return what the drill came to.

    ``at``: when it was done; ``end``: the line that ended the recovery; ``world``: ranks before and after;
    ``step``: the furthest since then, ``before``: at the fault.
    """
    f = Fields(end.fields if end is not None else {})
    why = ""
    if end is None:
        why = "the run has not recovered in time"
    elif end.kind == "verdict":
        why = f"the run ended with the verdict {f.text('verdict', '?')}"
    elif step is None or (before is not None and step <= before):
        why = "no step beyond that of the fault was done in time"
    elif world[0] != world[1]:
        why = f"{world[1]} ranks train now, not {world[0]}"
    elif state.startswith("WRONG"):
        why = state
    alone = end is not None and end.kind == "rank_restarted"
    return LiveResult(
        name=plan.drill, passed=not why, why=why, fault=plan.fault, node=plan.node, rank=plan.rank, time=at,
        recovery_s=f.number("seconds") if alone else f.number("recovery_s"), detection_s=f.number("detection_s"),
        repeated_steps=f.whole("lost_steps"), kind=f.text("kind"), went_on_to=step, state=state,
    )  # fmt: skip


def compares(events: Sequence[Event]) -> bool:
    """Return whether the run compares its replicas, as far as it has said so."""
    return any(event.kind in ("step_verified", "digests_differ") for event in events)


def compared(events: Sequence[Event]) -> str:
    """Return what the run said of its replicas; ``events`` from the recovery on. "" while it has said nothing."""
    for event in events:
        f = Fields(event.fields)
        if event.kind == "digests_differ":
            return f"WRONG: replicas differ at step {f.whole('step')}"
        if event.kind == "step_verified":
            return f"right: replicas were equal after step {f.whole('step')}"
    return ""
