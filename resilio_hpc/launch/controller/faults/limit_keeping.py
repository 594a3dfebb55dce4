"""The controller's part for the limits of a run: shown, kept for the next controller, and set by the user. Pure."""

from __future__ import annotations

import math

from msgspec.structs import replace

from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import KeepLimits
from resilio_hpc.launch.rundir.limit_files import HANG, HEARTBEAT, START, KeptLimits, LimitOrder
from resilio_hpc.watch.limit_table import LEARNED, OPTION, SET, LimitEntry, LimitTable

KEEP_S = 2.0  # at least, between two changes that are kept
COLLECTIVE_MORE_S = 60.0
NEVER_S = 600.0  # where no hang is acted on: torch's own limit with NCCL
COUNTS_S = 60.0  # the same, where only the number of waits has changed


class LimitKeeping:
    """Keeps the limits of ``table``, and follows the user's orders."""

    def __init__(self, run: RunState, out: Outbox, table: LimitTable) -> None:
        self._run = run
        self._out = out
        self._table = table
        self._given = run.config  # as the options say
        table.at_most_s = run.config.hang_timeout_s or math.inf  # 0: nothing is restarted
        self._order = LimitOrder()
        self._informed = False
        self._kept: list[tuple[str, float | None, str]] = []
        self._next, self._next_counts = 0.0, 0.0

    def take_up(self, kept: KeptLimits, order: LimitOrder) -> None:
        """Take what the run directory has, once: an earlier controller may have learned for the same program."""
        if self._informed:
            return
        self._informed = True
        if kept.program == self._run.config.program:
            waits = {entry.name: entry.waits for entry in kept.limits if entry.waits.number}
            self._table.take_up(kept.ranks, waits)
        self._order = LimitOrder(time=kept.ordered)
        self._follow(order, is_new=order.time > kept.ordered)

    def ordered(self, order: LimitOrder) -> None:
        """Take the user's order, as it was read last."""
        if self._informed and order.time > self._order.time:
            self._follow(order, is_new=True)

    def _follow(self, order: LimitOrder, is_new: bool) -> None:
        run, before = self._run, self._order
        self._order = order if order.time else before
        self._table.chosen = order.limits
        run.config = replace(
            run.config,
            start_timeout_s=order.limits.get(START, self._given.start_timeout_s),
            hang_timeout_s=order.limits.get(HANG, self._given.hang_timeout_s),
        )
        self._table.at_most_s = run.config.hang_timeout_s or math.inf
        if not is_new:
            return
        again = sorted(name for name, since in order.again.items() if since > before.time)
        for name in again:
            self._table.forget(name)
        self._out.record("limits_set", limits=dict(order.limits), again=again, by=order.by)
        self._next = 0.0

    def _collective_s(self, hang_s: float) -> float:
        """Return for how long a rank may wait in a collective.

        That is a little longer than the launcher waits, so that it acts first: on a hang, or a section of one rank.
        """
        longest_s = max(entry.limit_s or 0.0 for entry in self._table.entries())
        return max(longest_s, hang_s or NEVER_S) + COLLECTIVE_MORE_S

    def tick(self, hang_s: float) -> None:
        """Keep what has changed. ``hang_s``: until an uncertain hang is acted on, 0 for never."""
        now = self._run.now()
        if now < self._next:
            return
        self._next = now + KEEP_S
        self._run.collective_s = self._collective_s(hang_s)
        if not self._informed or not self._run.leads:
            return
        limits = [*self._table.entries(), *self._options(hang_s)]
        brief = [(entry.name, entry.limit_s, entry.source) for entry in limits]
        if brief == self._kept and now < self._next_counts:
            return
        self._kept, self._next_counts = brief, now + COUNTS_S
        run = self._run
        self._out.act(KeepLimits(KeptLimits(
            run.epoch, run.unix(), run.world_size, run.config.program, self._order.time, tuple(limits)
        )))  # fmt: skip

    def _options(self, hang_s: float) -> list[LimitEntry]:
        """Return the limits that options set."""
        config, chosen = self._run.config, self._table.chosen
        learned = config.hang_timeout_s is None
        return [
            LimitEntry(
                HANG, hang_s or None,
                SET if HANG in chosen else LEARNED if learned else OPTION,
            ),
            LimitEntry(START, config.start_timeout_s, SET if START in chosen else OPTION),
            LimitEntry(HEARTBEAT, config.heartbeat_timeout_s, OPTION),
        ]  # fmt: skip
