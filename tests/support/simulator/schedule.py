"""What a seed means: a cluster, a script, and faults with their times. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tests.support.virtual_cluster.ranks import Script

KINDS = {  # how often each fault is drawn
    "rank_dies": 10, "agent_killed": 10, "power_cut": 5, "node_alone": 7, "halves": 5, "groups": 3, "one_way": 4,
    "connection_breaks": 6, "bad_network": 6, "storage_hangs": 5, "storage_hangs_here": 5, "storage_fails": 3,
    "warning": 2, "saver_fails": 3, "frozen": 6, "agent_stopped": 3, "clock_jumps": 2, "spawner_dies": 3,
    "store_dies": 2, "slow_to_die": 2, "job_ends": 1.5, "hung_and_alone": 4,
}  # fmt: skip
ONCE = ("warning", "job_ends")
RETURNS = 0.05  # of all schedules: see ``_with_a_return``
ALONE = 0.6  # share of the schedules in which ranks that report no steps do not need one another
STOPS = 0.05  # of all schedules: see ``_with_a_stopped_rank``
PAUSES = 0.1  # of all schedules: see ``_with_a_test``
REENTERS = 0.5  # of all schedules with an attached script: its ranks live on
HOLDS = 0.5  # of all of them: ranks save the step that they finished last
LONG = 20  # times as many steps where a job after this one has to wait for it


@dataclass(frozen=True)
class Fault:
    """``kind`` strikes ``nodes`` at ``at`` for ``lasts`` (seconds of virtual time); ``value``: see ``faults``."""

    at: float
    kind: str
    nodes: tuple[str, ...] = ()
    lasts: float = 0.0
    value: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts:.2f} s" if self.lasts else ""
        return f"{self.kind} {','.join(self.nodes)}{lasts} ({self.value:.2f})"


@dataclass(frozen=True)
class Schedule:
    """Everything that a run needs to be the same again."""

    seed: int
    nodes: int
    spares: int
    slots: int
    minimum: int
    unit: int
    script: Script
    heartbeat_timeout_s: float
    max_without_progress: int
    chained: bool
    stalls_when_cut: bool  # the ranks' own network is cut with ours
    faults: tuple[Fault, ...]

    @property
    def start_timeout_s(self) -> float:
        """A last save that hangs is awaited for longer than a start takes otherwise."""
        return 80.0 if self.script.holds else 25.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + self.spares + 1))

    @property
    def has_next_job(self) -> bool:
        """Whether Slurm ends this job, and another one goes on."""
        return any(fault.kind == "job_ends" for fault in self.faults)

    @property
    def healed_at(self) -> float:
        """From then on nothing breaks any more."""
        return max((fault.at + fault.lasts for fault in self.faults), default=0.0) + 0.1

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes (at least {self.minimum}, unit {self.unit}), {self.spares} spares"
        lives = f"{', ranks live on' if self.script.reenters else ''}"
        lives += f"{f', last saves ({self.script.holds})' if self.script.holds else ''}"
        script = f"{'attached' if self.script.attached else 'plain'} script, {self.script.steps} steps of"
        return (
            f"seed {self.seed}: {nodes}, {self.slots} ranks each; {script} {self.script.step_s} s, save every "
            f"{self.script.save_every}; heartbeat timeout {self.heartbeat_timeout_s} s; "
            f"max restarts {self.max_without_progress}{', chained' if self.chained else ''}{lives}"
        )


def schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    return _with_lives_that_go_on(Random(f"{seed} lives on"), _shape(seed))


def _with_lives_that_go_on(draw: Random, shape: Schedule) -> Schedule:
    """Ranks that live on, and last saves, drawn apart: other schedules are as they were without these.

    Then a rank often fails, and something else happens while the others save, leave and enter."""
    reenters = draw.random() < REENTERS
    holds = draw.choice(("own", "shared", "shared")) if draw.random() < HOLDS else ""
    if not shape.script.attached or not (reenters or holds):
        return shape
    script = replace(shape.script, reenters=reenters, holds=holds)
    shape = replace(shape, script=script)
    more: list[Fault] = []
    for _ in range(draw.choice((0, 1, 1, 2))):
        at = draw.uniform(0.5, script.steps * script.step_s + 2.0)
        more.append(Fault(at, "rank_dies", (draw.choice(shape.names),), 0.0, draw.random()))
        kind = draw.choice(("", "rank_dies", "agent_killed", "power_cut", "spawner_dies", "node_alone", "frozen",
                            "agent_stopped", "store_dies", "connection_breaks"))  # fmt: skip
        if kind:
            more.append(_DRAW.get(kind, _plain)(draw, shape, at + draw.uniform(0.0, 1.5), kind))
    return replace(shape, faults=tuple(sorted((*shape.faults, *more), key=lambda fault: fault.at)))


def _shape(seed: int) -> Schedule:
    draw = Random(seed)
    nodes = draw.choices((1, 2, 3, 4, 5), (1, 4, 5, 4, 2))[0]
    spares = draw.choices((0, 1, 2), (5, 3, 1))[0] if nodes < 5 else draw.choice((0, 1))
    minimum = draw.choice((nodes, max(1, nodes - 1), 1, max(1, nodes // 2)))
    script = Script(
        steps=draw.randint(6, 18), step_s=draw.choice((0.4, 0.7, 1.1)), save_every=draw.randint(1, 5),
        attached=draw.random() < 0.8, start_s=draw.choice((0.1, 0.6)),
    )  # fmt: skip
    if Random(f"{seed} alone").random() < ALONE:
        script = replace(script, alone=True)
    shape = Schedule(
        seed, nodes, spares, draw.choice((1, 1, 2)), minimum, 1, script, draw.choice((3.0, 5.0, 8.0)),
        draw.choice((2, 4, 8)), draw.random() < 0.2, draw.random() < 0.5, (),
    )  # fmt: skip
    until = shape.script.steps * shape.script.step_s + 2.0
    shape = replace(shape, faults=_faults(draw, shape, until))
    if shape.has_next_job:
        return _as_long_as_leases_last(draw, shape)
    apart = Random(f"{seed} comes back")
    if nodes > 1 and apart.random() < RETURNS:
        return _with_a_return(apart, shape)
    apart = Random(f"{seed} stands still")
    if apart.random() < STOPS:
        return _with_a_stopped_rank(apart, shape)
    apart = Random(f"{seed} is tested")
    return _with_a_test(apart, shape) if apart.random() < PAUSES else shape


def _with_a_test(draw: Random, shape: Schedule) -> Schedule:
    """The nodes are tested while faults strike, and one of them may be slow."""
    script = replace(shape.script, steps=3 * shape.script.steps, attached=True)
    first = draw.uniform(0.5, 0.5 * script.steps * script.step_s)
    tests = [
        Fault(at, "nodes_tested", (draw.choice(shape.names),), draw.uniform(0.1, 8.0), draw.random())
        for at in (first, first + draw.uniform(0.0, 20.0))
    ]
    return replace(shape, script=script, faults=tuple(sorted((*shape.faults, *tests), key=lambda fault: fault.at)))


def _with_a_stopped_rank(draw: Random, shape: Schedule) -> Schedule:
    """A rank is stopped, in a run that is long enough to know how long a step takes, as a rule."""
    script = replace(shape.script, steps=3 * shape.script.steps)
    at = draw.uniform(0.5, script.steps * script.step_s)
    stopped = Fault(at, "rank_stopped", (draw.choice(shape.names),), 0.0, draw.random())
    return replace(shape, script=script, faults=tuple(sorted((*shape.faults, stopped), key=lambda fault: fault.at)))


def _with_a_return(draw: Random, shape: Schedule) -> Schedule:
    """A node comes back to a run that has gone on without it, and that is short of nodes just then; soon after that the
    ranks fail again, before they have saved."""
    shape = replace(shape, spares=max(1, shape.spares), minimum=draw.choice((shape.nodes, shape.minimum)))
    absent, lost = draw.sample(shape.names, 2)
    at, timeout_s = draw.uniform(1.0, 6.0), shape.heartbeat_timeout_s
    lasts = timeout_s * draw.uniform(2.0, 3.5)
    back = at + lasts
    more = (
        Fault(at, draw.choice(("node_alone", "frozen")), (absent,), lasts, draw.random()),
        Fault(at - 1.0, "saver_fails", shape.names, 1.5, draw.random()),  # what memory holds is not committed
        Fault(back - timeout_s * draw.uniform(0.8, 1.2), "power_cut", (lost,), 0.0, draw.random()),
        *(Fault(back + draw.uniform(0.5, 4.0), "rank_dies", (draw.choice(shape.names),), 0.0, draw.random())
          for _ in range(2)),
    )  # fmt: skip
    script = replace(shape.script, steps=4 * shape.script.steps, save_every=draw.randint(3, 5), attached=True)
    faults = tuple(sorted((*shape.faults[:1], *more), key=lambda fault: fault.at))
    return replace(shape, script=script, faults=faults)


def _as_long_as_leases_last(draw: Random, shape: Schedule) -> Schedule:
    """Until nodes that were not told of the job's end must have stopped by themselves; with more that strikes them."""
    more = tuple(
        _DRAW.get(kind, _plain)(draw, shape, draw.uniform(0.0, 90.0), kind)
        for kind in draw.choices(("agent_killed", "node_alone", "storage_hangs", "halves", "rank_dies"), k=3)
    )
    script = replace(shape.script, steps=LONG * shape.script.steps)
    faults = tuple(sorted((*shape.faults, *more), key=lambda fault: fault.at))
    return replace(shape, script=script, minimum=1, faults=faults)


def _faults(draw: Random, shape: Schedule, until: float) -> tuple[Fault, ...]:
    found: list[Fault] = []
    for _ in range(draw.choices((1, 2, 3, 4, 6), (4, 5, 4, 3, 1))[0]):
        at = draw.uniform(0.0, until)
        if found and draw.random() < 0.6:  # shortly after another one: in its recovery
            at = found[-1].at + draw.choice(
                (0.0, draw.uniform(0.0, 1.0), draw.uniform(0.0, 2 * shape.heartbeat_timeout_s))
            )
        (kind,) = draw.choices(tuple(KINDS), tuple(KINDS.values()))
        if kind in ONCE and any(fault.kind == kind for fault in found):
            continue
        found.append(_DRAW.get(kind, _plain)(draw, shape, at, kind))
    return tuple(sorted(found, key=lambda fault: fault.at))


def _span(draw: Random, shape: Schedule) -> float:
    """Short, about as long as it takes to be noticed, or long."""
    return draw.choice(
        (draw.uniform(0.05, 1.0), draw.uniform(0.5, 1.5) * shape.heartbeat_timeout_s, draw.uniform(5, 25))
    )


def _plain(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    return Fault(at, kind, (draw.choice(shape.names),), 0.0, draw.random())


def _lasting(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    return Fault(at, kind, (draw.choice(shape.names),), _span(draw, shape), draw.random())


def _many(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    """Some of the nodes, at least one."""
    some = tuple(name for name in shape.names if draw.random() < 0.5) or (draw.choice(shape.names),)
    return Fault(at, kind, some, _span(draw, shape), draw.random())


def _most(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    """Most of the nodes are not told; for so long that they must find out by themselves, as a rule."""
    some = tuple(name for name in shape.names if draw.random() < 0.8)
    return Fault(at, kind, some, draw.choice((draw.uniform(1, 100), 300.0)), draw.random())


def _halves(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    shuffled = draw.sample(shape.names, len(shape.names))
    return Fault(at, kind, tuple(shuffled[: len(shuffled) // 2]), _span(draw, shape), draw.random())


def _everywhere(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    return Fault(at, kind, (), _span(draw, shape), draw.random())


def _brief(draw: Random, shape: Schedule, at: float, kind: str) -> Fault:
    return Fault(at, kind, (draw.choice(shape.names),), draw.uniform(0.01, 0.04) * shape.heartbeat_timeout_s, 0.0)


_DRAW: dict[str, Callable[[Random, Schedule, float, str], Fault]] = {
    "node_alone": _lasting, "halves": _halves, "groups": _many, "one_way": _many, "bad_network": _everywhere,
    "storage_hangs": _everywhere, "storage_hangs_here": _lasting, "storage_fails": _everywhere, "saver_fails": _lasting,
    "frozen": _lasting, "agent_stopped": _brief, "slow_to_die": _lasting, "job_ends": _most, "hung_and_alone": _lasting,
}  # fmt: skip
