"""One schedule, from the start to the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.support.simulator.faults import strike
from tests.support.simulator.links import LONGEST_S, WATCHED_S
from tests.support.simulator.schedule import Fault, Schedule, schedule
from tests.support.simulator.story import Story
from tests.support.simulator.world import SeededWorld
from tests.support.virtual_cluster.invariants import Violation

GIVEN_UP_S = 360.0  # by then agents without a controller have given the job up, with a verdict
LONGEST_PAUSE_S = 60.0  # a test takes no longer while ranks pause
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
    ledger: tuple[tuple[float, str, dict[str, Any]], ...] = ()


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
    ledger = tuple(world.ledger) if tell else ()
    lines = tuple(story.lines(violation)) if story else ()
    felt = tuple(sorted(world.felt.items()))
    return Outcome(plan.seed, verdict, violation, world.now - began, world.events, felt, lines, ledger)


def _strike(world: SeededWorld, fault: Fault) -> None:
    world.record("fault", {"fault": str(fault)})
    strike(world, fault)


def bound_s(plan: Schedule) -> float:
    """Within this time after the last fault everything is over: all training anew, and some recoveries."""
    training = plan.script.steps * plan.script.step_s + plan.script.start_s
    tests = sum(fault.kind == "nodes_tested" for fault in plan.faults)
    return 2 * training + 12 * plan.heartbeat_timeout_s + 2 * plan.start_timeout_s + 30.0 + tests * LONGEST_PAUSE_S


def _to_the_end(world: SeededWorld, plan: Schedule) -> None:
    deadline = world.now + plan.healed_at + bound_s(plan)
    for fault in plan.faults:
        if fault.kind == "job_ends":
            world.advance(world.now + fault.at, MOST_EVENTS)
    if world.chain.ended:
        _to_the_next_job(world)
        return
    world.advance(deadline, MOST_EVENTS)
    if world.agents and world.directory.verdict is None:
        world.advance(world.now + GIVEN_UP_S, MOST_EVENTS)  # what is left is no quorum
    if world.agents and world.directory.verdict is None:
        raise Violation(f"no verdict {bound_s(plan) + GIVEN_UP_S:.0f} s after everything was healed")
    if world.agents:
        raise Violation(f"{', '.join(world.agents)} stayed though the verdict is known")
    world.watch.ended()


def _to_the_next_job(world: SeededWorld) -> None:
    """Slurm ended the job: the next one trains before long, and alone."""
    world.advance(world.now + LONGEST_S + 2 * world.config.heartbeat_timeout_s, MOST_EVENTS, deserted=True)
    if world.chain.trains_since is None:
        raise Violation(f"the next job does not train {LONGEST_S:.0f} s after the one before it ended")
    world.advance(world.chain.trains_since + WATCHED_S, MOST_EVENTS, deserted=True)
