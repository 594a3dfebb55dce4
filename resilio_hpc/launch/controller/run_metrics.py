"""The values of metrics that only the controller knows: part ``run`` of ``metrics/schema``."""

from __future__ import annotations

from collections.abc import Callable

from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.state import Phase

PHASES = tuple(Phase)


class RunMetrics:
    """Adds up times between two calls; another controller begins again at 0, as counters may."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Take the clock: monotonic seconds."""
        self._clock = clock
        self._of: Controller | None = None
        self._last = 0.0
        self._led_s = self._stepping_s = 0.0
        self._progress: tuple[int, int] = (-1, -1)  # (step, committed step)
        self._progressed = 0.0

    def values(self, controller: Controller | None) -> dict[str, float]:
        """Return the values of now; none where no controller is here."""
        if controller is None:
            self._of = None
            return {}
        now = self._clock()
        if controller is not self._of:
            self._of, self._last, self._led_s, self._stepping_s = controller, now, 0.0, 0.0
            self._progressed = now
        run, stalled_s = controller.run, controller.hangs.stalled_s()
        self._led_s += now - self._last
        if run.phase is Phase.RUNNING and stalled_s is None:
            self._stepping_s += now - self._last
        self._last = now
        steps = [run.agents[member.node].step for member in run.members if member.node in run.agents]
        values = {
            "run_phase": PHASES.index(run.phase), "run_round": run.round, "run_restarts": run.restarts,
            "run_ranks": run.world_size, "run_nodes": len(run.agents), "run_nodes_lost": len(run.lost),
            "run_stalled_seconds": stalled_s or 0.0, "run_led_seconds_total": self._led_s,
            "run_stepping_seconds_total": self._stepping_s,
            "run_restarts_left": max(0, run.config.max_without_progress - run.without_progress),
        }  # fmt: skip
        if steps and min(steps) >= 0:
            values["run_step"] = min(steps)
        if run.committed is not None and run.committed >= 0:
            values["run_committed_step"] = run.committed
        if run.last_save_s is not None:
            values["run_save_seconds"] = run.last_save_s
        progress = (min(steps, default=-1), run.committed)
        if progress != self._progress:
            self._progress, self._progressed = progress, now
        if run.steps_reported or run.committed >= 0:
            values["run_progress_age_seconds"] = now - self._progressed
        return values
