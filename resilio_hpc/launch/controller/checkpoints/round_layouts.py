"""The layouts that the planner chose (``--layout auto``), round by round: what in memory is of use. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from resilio_hpc.launch.config.planned_layouts import layout_fields
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState


def of_another_layout(run: RunState, steps: Iterable[int]) -> set[int]:
    """Return the steps in memory that a round of as many ranks, but another layout, has left there.

    Nodes with another type of GPU may take the places of others: the ranks are as many, and their parts differ.
    """
    now, before = run.layout, run.started_layout
    if now is None or before is None:
        return set()
    if now.ranks == before.ranks and now.values != before.values:
        return set(steps)
    return {step for step in steps if step <= run.old_layout_until}


class RoundLayouts:
    """Notes the layouts of rounds that start."""

    def __init__(self, run: RunState, out: Outbox) -> None:
        self._run = run
        self._out = out

    def start(self, restored: int) -> None:
        """Record the layout of this round, and why, where it is another one than before.

        ``restored``: the step that it goes on from, -1: none. Agents drop newer ones from memory, and keep older ones,
        which may be of the former layout.
        """
        run = self._run
        layout, before = run.layout, run.started_layout
        if layout is None or layout == before:
            return
        if before is not None and layout.values != before.values:
            run.old_layout_until = restored
        self._out.record("layout", **layout_fields(layout, before, run.round))
        run.started_layout = layout
