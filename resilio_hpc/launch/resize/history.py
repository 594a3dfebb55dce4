"""A run's sizes in its ledger: step times, what a restart cost, what was resized and when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from resilio_hpc.autoparallel import Measurement
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event

RESIZED = ("grow", "shrink", "end", "withdraw", "reshape")


@dataclass(frozen=True)
class ResizeHistory:
    """``steps``: one measurement per round in which at least two checkpoints were committed.

    ``restart_s``: from the order to the first step of all ranks, the median of planned restarts, else of recoveries;
    None without any.

    ``last_resize``: Unix seconds of the last growth or shrinkage, None for never. ``asked_to_leave``: when each joiner
    job was first asked to leave; ``told_to_end``: when it was ended. ``submitted``: joiner jobs, the oldest first, and
    when; ``joined``: those of any joiner that reached the run; ``withdrawn``: those that made room for others.
    ``own_nodes``: of the newest launch.
    """

    steps: tuple[Measurement, ...] = ()
    restart_s: float | None = None
    last_resize: float | None = None
    asked_to_leave: Mapping[str, float] = field(default_factory=dict)
    told_to_end: Mapping[str, float] = field(default_factory=dict)
    submitted: Mapping[str, float] = field(default_factory=dict)
    withdrawn: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    own_nodes: int = 0
    round: int = -1
    trains: bool = False  # every rank of the newest round has done a step

    def lost_in_a_row(self, in_queue: Iterable[str], since: float) -> int:
        """Return the newest joiner jobs, submitted after ``since``, that ended without joining or being withdrawn."""
        present, lost = set(in_queue), 0
        for job, at in reversed(list(self.submitted.items())):
            if job in self.joined or job in present or at < since:
                break
            lost += job not in self.withdrawn
        return lost


def read_history(events: Sequence[Event]) -> ResizeHistory:
    """Return the history from the events of a run, by time."""
    resizes = [(event.time, Fields(event.fields)) for event in events if event.kind == "resize"]
    acted = [(at, f) for at, f in resizes if f.data.get("acted") is True]
    leave: dict[str, float] = {}
    for at, f in acted:
        if f.text("action") == "shrink":
            for job in f.texts("jobs"):
                leave.setdefault(job, at)
    launches = [Fields(event.fields) for event in events if event.kind == "launch"]
    rounds = [Fields(event.fields).whole("round") for event in events if event.kind == "round"]
    newest = next((number for number in reversed(rounds) if number is not None), -1)
    return ResizeHistory(
        steps=_steps(events),
        restart_s=_restart_s(events),
        last_resize=max((at for at, f in acted if f.text("action") in ("grow", "shrink", "end")), default=None),
        asked_to_leave=leave,
        told_to_end={job: at for at, f in acted if f.text("action") == "end" for job in f.texts("jobs")},
        submitted={job: at for at, f in acted if f.text("action") == "grow" for job in f.texts("jobs")},
        withdrawn=frozenset(
            job
            for _, f in acted
            if (f.text("action"), f.text("code")) == ("withdraw", "others_wait")
            for job in f.texts("jobs")
        ),
        joined=frozenset(Fields(event.fields).text("job") for event in events if event.kind == "joins"),
        own_nodes=len(launches[-1].texts("nodes")) if launches else 0,
        round=newest,
        trains=any(e.kind == "first_step" and Fields(e.fields).whole("round") == newest for e in events),
    )


def _steps(events: Sequence[Event]) -> tuple[Measurement, ...]:
    """Return the time per step of each round: from its first to its last commit, by the steps between them."""
    found: list[Measurement] = []
    nodes, commits = 0, list[tuple[float, int]]()

    def close() -> None:
        if nodes and len(commits) > 1 and commits[-1][1] > commits[0][1] and commits[-1][0] > commits[0][0]:
            (began, first), (ended, last) = commits[0], commits[-1]
            found.append(Measurement(nodes, (ended - began) / (last - first)))

    for event in events:
        f = Fields(event.fields)
        if event.kind == "round":
            close()
            nodes, commits = len(f.texts("members")), []
        elif event.kind == "first_step":
            commits = []  # a commit of the round before may have come late
        elif event.kind == "committed" and (step := f.whole("step")) is not None:
            commits.append((event.time, step))
        elif event.kind in ("rank_failed", "node_lost", "stopping", "launch_ends") and not f.data.get("alone"):
            close()
            nodes = 0
    close()
    return tuple(found)


def _restart_s(events: Sequence[Event]) -> float | None:
    planned, recovered, began = list[float](), list[float](), None
    for event in events:
        if event.kind == "regroup":
            began = event.time
        elif event.kind == "first_step" and began is not None:
            planned.append(event.time - began)
            began = None
        elif event.kind in ("rank_failed", "node_lost"):
            began = None
        elif event.kind == "recovered" and (took := Fields(event.fields).number("recovery_s")) is not None:
            recovered.append(took)
    costs = [cost for cost in planned or recovered if cost >= 0]
    return median(costs) if costs else None
