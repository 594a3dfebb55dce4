"""What the ledger is told of the layouts that the planner chose (``--layout auto``). Pure."""

from __future__ import annotations

from resilio_hpc.launch.config.planned_layouts import PlannedLayout, layout_fields
from resilio_hpc.launch.controller.outbox import Outbox
from resilio_hpc.launch.controller.run_state import RunState


class RoundLayouts:
    """Remembers the layout that was told last."""

    def __init__(self, run: RunState, out: Outbox) -> None:
        self._run = run
        self._out = out
        self._told: PlannedLayout | None = None

    def tell(self) -> None:
        """Record the layout of this round, and why, where it is another one than before."""
        run = self._run
        plan = run.config.plan
        layout = plan.of(run.world_size, plan.gpu_among([member.node for member in run.members]))
        if layout is not None and layout != self._told:
            self._out.record("layout", **layout_fields(layout, self._told, run.round))
            self._told = layout
