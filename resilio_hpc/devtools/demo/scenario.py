"""The scenario of the demo: which fault at which step. Data and pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.core.ledger import Event


@dataclass(frozen=True)
class Scenario:
    """The job's size and length. ``time_limit`` is Slurm's, in minutes; ``step_s`` the shortest duration of a step."""

    nodes: int = 5
    spares: int = 1
    ranks_per_node: int = 2
    steps: int = 900
    step_s: float = 0.1
    save_every: int = 10
    time_limit: int = 2
    layers: int = 2
    width: int = 64

    @property
    def training_nodes(self) -> int:
        """Return the nodes that train."""
        return self.nodes - self.spares

    def script_arguments(self, hash_file: str, throttled: bool) -> list[str]:
        """Return arguments of examples/train_gpt.py."""
        return [
            "--steps", str(self.steps), "--every", str(self.save_every), "--layers", str(self.layers),
            "--width", str(self.width), "--log-every", "100", "--hash-file", hash_file,
            *(["--step-seconds", str(self.step_s)] if throttled else []),
        ]  # fmt: skip


QUICK = Scenario(nodes=3, steps=400, step_s=0.12, time_limit=1)


@dataclass(frozen=True)
class Strike:
    """One fault: ``kind``: its name; ``at``: the share of all steps after which it happens."""

    kind: str
    at: float
    title: str


STRIKES = (
    Strike("rank_killed", 0.06, "SIGKILL of a rank"),
    Strike("agent_lost", 0.13, "SIGKILL of a node's agent"),
    Strike("controller_lost", 0.22, "SIGKILL of the agent that is the controller"),
    Strike("node_lost", 0.31, "power cut of a node"),
    Strike("rank_killed", 0.85, "SIGKILL of a rank"),
)


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of one fault. ``recovery_s``: from the fault itself to the first step of all ranks after it."""

    kind: str
    node: str
    recovered: bool
    recovery_s: float | None
    lost_steps: int | None


def outcome(kind: str, node: str, struck_at: float, events: list[Event]) -> FaultOutcome:
    """Return how the run came over a fault at ``struck_at`` (Unix seconds), by its ledger. Pure.

    Where the job's time limit came first, the next job trains again.
    """
    job_ended = False
    for event in events:
        if event.time <= struck_at:
            continue
        job_ended = job_ended or event.kind == "verdict"
        if event.kind == "recovered" or (event.kind == "first_step" and job_ended):
            stepped = event.fields.get("at", event.time)
            lost = event.fields.get("lost_steps")
            return FaultOutcome(kind, node, True, round(max(0.0, float(stepped) - struck_at), 3), lost)
    return FaultOutcome(kind, node, False, None, None)


def time_limits(events: list[Event]) -> list[FaultOutcome]:
    """Return one entry for each job that ended at its time limit and was carried on by the next. Pure.

    ``recovery_s``: from the end of the last step of one job to the first step of the next.
    """
    found = []
    for index, event in enumerate(events):
        if event.kind == "verdict" and event.fields.get("verdict") == "time_limit":
            later = events[index + 1 :]
            first = next((e for e in later if e.kind == "first_step"), None)
            restored = first.fields.get("restored") if first else None
            committed = event.fields.get("committed", -1)
            lost = max(0, committed - restored) if isinstance(restored, int) else None
            seconds = round(first.time - event.time, 3) if first else None
            found.append(
                FaultOutcome("time_limit", str(event.fields.get("node", "")), first is not None, seconds, lost)
            )
    return found
