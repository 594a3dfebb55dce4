"""One schedule, from the start to the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from virtual_cluster.agent import VirtualAgent
from virtual_cluster.invariants import Violation

from resilio_hpc.launch import messages as m
from simulator.faults import strike
from simulator.links import LONGEST_S, WATCHED_S
from simulator.schedule import Fault, Schedule, schedule
from simulator.story import Story
from simulator.world import SeededWorld

ALONE_S = 60.0  # told to end but without a controller for so long, an agent ends all the same
FAREWELL_S = 100.0  # told to end, every agent has gone by then, with or without a controller
MOST_EVENTS = 1_000_000  # many times what the longest run takes


@dataclass(frozen=True)
class Outcome:
    """How a run went. ``verdict`` "" when there was none; ``violation`` "" when every invariant held.

    ``felt``: how often each kind of fault found something to strike."""

    seed: int
    verdict: str
    violation: str
    lasted_s: float
    events: int = 0
    felt: tuple[tuple[str, int], ...] = ()
    story: tuple[str, ...] = ()


def simulate(seed: int, tell: bool = False) -> Outcome:
    """Run a seed; with ``tell`` remember its story."""
    return run(schedule(seed), tell)


def run(plan: Schedule, tell: bool = False) -> Outcome:
    """Run a schedule until its end, or until an invariant does not hold."""
    world = SeededWorld(plan)
    story = Story(world) if tell else None
    began = world.now
    for fault in plan.faults:
        world.after(fault.at, partial(_strike, world, fault))
    violation = ""
    try:
        _to_the_end(world, plan)
    except Violation as error:
        violation = str(error)
    except Exception as error:  # noqa: BLE001  # an assertion or a crash of the real code is a finding, too
        violation = f"{type(error).__name__}: {error}"
        if tell:
            import traceback

            world.record("crashed", {"traceback": traceback.format_exc()})
    verdict = str(world.directory.verdict["verdict"]) if world.directory.verdict else ""
    lines = tuple(story.lines(violation)) if story else ()
    felt = tuple(sorted(world.felt.items()))
    return Outcome(plan.seed, verdict, violation, world.now - began, world.events, felt, lines)


def _strike(world: SeededWorld, fault: Fault) -> None:
    world.record("fault", {"fault": str(fault)})
    strike(world, fault)


def bound_s(plan: Schedule) -> float:
    """Within this time after the last fault everything is over: all training anew, and some recoveries."""
    training = plan.script.steps * plan.script.step_s + plan.script.start_s
    return 2 * training + 12 * plan.heartbeat_timeout_s + 2 * 25.0 + 30.0


def _to_the_end(world: SeededWorld, plan: Schedule) -> None:
    deadline = world.now + plan.healed_at + bound_s(plan)
    for fault in plan.faults:
        if fault.kind == "job_ends":
            world.advance(world.now + fault.at, MOST_EVENTS)
    if world.chain.ended:
        _to_the_next_job(world)
        return
    world.advance(deadline, MOST_EVENTS)
    if world.agents and world.directory.verdict is None and _most_are_there(world):
        raise Violation(f"no verdict {bound_s(plan):.0f} s after everything was healed")
    if world.agents and world.directory.verdict is not None:
        raise Violation(f"{', '.join(world.agents)} stayed though the verdict is known")
    for agent in list(world.agents.values()):
        _tell_to_end(world, agent)
    world.advance(world.now + FAREWELL_S, MOST_EVENTS)
    if world.agents:
        raise Violation(f"told to end, {', '.join(world.agents)} stayed")
    world.watch.ended()


def _to_the_next_job(world: SeededWorld) -> None:
    """Slurm ended the job: the next one trains before long, and alone."""
    world.advance(world.now + LONGEST_S + 2 * world.config.heartbeat_timeout_s, MOST_EVENTS, deserted=True)
    if world.chain.trains_since is None:
        raise Violation(f"the next job does not train {LONGEST_S:.0f} s after the one before it ended")
    world.advance(world.chain.trains_since + WATCHED_S, MOST_EVENTS, deserted=True)


def _tell_to_end(world: SeededWorld, agent: VirtualAgent) -> None:
    """The job is over: SIGTERM."""
    agent.event(lambda: agent.core.warned("TERM"))
    alone = m.End(1 << 60, "terminated", 143)
    world.after(ALONE_S, lambda: agent.event(lambda: agent.core.controller_said(alone)))


def _most_are_there(world: SeededWorld) -> bool:
    return 2 * len(world.agents) > len(world.sites)
