"""The controller's part for a checkpoint that a user orders (``resilio checkpoint``). Pure.

All ranks are told of a step that they will soon have finished, and save it. A rank that is past it already does not, so
that the step is never whole: then a later one is named. Any later step that is committed meanwhile serves as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.protocol import messages as m

AHEAD_S = 3.0  # until all ranks have heard of the step: how far they are is known from their last heartbeats
MARGIN_STEPS = 2
TRIES = 4  # each further ahead
SAVE_S = 10.0  # behind the step, for a node's snapshots
LIMIT_S = 3600.0  # of one order, over restarts and slow disks


class _Order(Struct):
    """One order. ``after``: the furthest step of a rank when it came; ``number``: the step that is to be saved.

    ``passed``: when it was seen that ranks are past that step.
    """

    mark: str
    by: str
    after: int
    began: float
    tries: int = 0
    number: int = -1
    passed: float | None = None
    round: int = -1


class OrderedSaves:
    """Carries out orders to save, one after the other."""

    def __init__(self, run: RunState, out: Outbox, has_begun: Callable[[int], bool]) -> None:
        """``has_begun``: whether a node's snapshot of a step is whole."""
        self._run = run
        self._out = out
        self._has_begun = has_begun
        self._order: _Order | None = None

    def begin(self, mark: str, by: str) -> None:
        """Take an order, or record why it cannot be carried out."""
        run = self._run
        order = _Order(mark, by, run.max_step, run.now())
        self._out.record("checkpoint_ordered", by=by, asked=mark, step=run.max_step)
        why = self._why_not()
        if self._order is not None:
            why = "another order is being carried out"
        if why:
            self._over(order, why)
        else:
            self._order = order
            self.tick()

    def _why_not(self) -> str:
        run = self._run
        if run.config.mode is Mode.OBSERVE:
            return f"--mode {run.config.mode} writes no checkpoints"
        if run.stopping:
            return "the run stops, and saves by itself"
        if run.phase is Phase.RUNNING and not run.steps_reported:
            return "the script reports no steps, so its ranks cannot save at the same one"
        return ""

    def tick(self) -> None:
        """Name the next step where the one before did not come to be saved; see whether one is committed."""
        run, order = self._run, self._order
        if order is None:
            return
        if run.committed > order.after:
            self._over(order, "")
        elif why := self._why_not():
            self._over(order, why)
        elif run.now() > order.began + LIMIT_S:
            self._over(order, f"no step was committed within {LIMIT_S:.0f} s")
        elif run.phase is Phase.RUNNING and run.leads:
            if order.round != run.round:  # ranks were restarted, and know of no order
                order.round, order.tries, order.number = run.round, 0, -1
            if order.number >= 0 and order.passed is None and run.max_step > order.number:
                order.passed = run.now()
            is_late = order.passed is not None and run.now() > order.passed + SAVE_S
            if order.number < 0 or (is_late and not self._has_begun(order.number)):
                self._name_step(order)

    def _name_step(self, order: _Order) -> None:
        run = self._run
        if order.tries == TRIES:
            self._over(order, "ranks did not save: the loop is not that of run.steps with save=, or has few steps left")
            return
        order.tries += 1
        step_s = max((agent.step_time for agent in run.agents.values()), default=0.0)
        steps = MARGIN_STEPS * order.tries + (math.ceil(order.tries * AHEAD_S / step_s) if step_s > 0 else 0)
        order.number, order.passed = run.max_step + steps, None
        for member in run.members:
            self._out.send(member.node, m.SaveAtStep(run.epoch, run.round, order.number))

    def _over(self, order: _Order, why: str) -> None:
        run = self._run
        if order is self._order:
            self._order = None
        step = -1 if why else run.committed
        self._out.record(
            "checkpoint_made", asked=order.mark, by=order.by, step=step, seconds=round(run.now() - order.began, 3),
            why=why,
        )  # fmt: skip
