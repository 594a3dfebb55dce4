"""Signals that reach the launcher, on their way to its agents; an order to stop holds for agents that start later."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.allocation.placements import Placement, Site, SiteMode
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import JobEnds

WARNINGS = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # sbatch --signal=B:…: the time limit is near
STOP_LIMIT_S = 60.0  # for a stop, after --stop-grace: by then the verdict is written
STOP_AGAIN_S = 30.0  # repeats a stop that Slurm did not pass on, or that came before an agent ran


class AgentSignals:
    """Passes signals on to the agents of one site. ``placements``: the agents, as they are now."""

    def __init__(self, site: Site, placements: Sequence[Placement], ledger: Ledger) -> None:
        self.stop_order = ""  # "TERM" or "INT": the launch is to end, whatever else happens
        self._site = site
        self._placements = placements
        self._ledger = ledger
        self._received: list[int] = []
        self._orders = 0  # orders to stop, by signals
        self._ordered_at = self._next_stop = 0.0

    def catch(self, handled: tuple[str, ...]) -> None:
        """From now on, pass signals on to the agents."""
        for number in {*WARNINGS, *(signal.Signals[name] for name in handled)}:
            signal.signal(number, lambda received, _frame: self._received.append(received))

    def stop_in_order(self, now: float) -> None:
        """Do as after SIGTERM: all ranks save and end."""
        if not self.stop_order:
            self._order_stop("TERM", now)

    def stop_overdue(self, now: float) -> bool:
        """Return whether the agents had time enough to end after the order to stop."""
        limit_s = self._placements[0].recipe.settings.options.stop_grace_s + STOP_LIMIT_S
        return bool(self.stop_order) and now - self._ordered_at > limit_s

    def forward(self) -> frozenset[int]:
        """Pass on and return the signals that came. Raise KeyboardInterrupt at a SIGINT after another order to stop."""
        received, self._received = self._received, []
        for number in received:
            self._ledger.append("signal", signal=signal.Signals(number).name, to="agents")
            if number in WARNINGS:
                self._signal_agents("USR2")
                continue
            self._orders += 1
            name = "INT" if number == signal.SIGINT else "TERM"
            if name == "INT" and self._orders > 1:
                self.stop_order = name
                say("interrupted again: everything is killed at once")
                raise KeyboardInterrupt
            self._order_stop(name, time.monotonic())
        return frozenset(received)

    def _order_stop(self, name: str, now: float) -> None:
        """Order a stop, also of agents that start later, and repeat it: it may get lost."""
        if not self.stop_order:
            self._ordered_at = now
        self.stop_order = name
        self._next_stop = now + STOP_AGAIN_S
        self._signal_agents(name)

    def repeat(self, now: float) -> None:
        """Order the stop again, when it is time to."""
        if self.stop_order and now >= self._next_stop:
            self._order_stop(self.stop_order, now)

    def _signal_agents(self, name: str) -> None:
        if self._site.mode is not SiteMode.BATCH:
            for placement in self._placements:
                placement.signal(signal.Signals[f"SIG{name}"])
            return
        try:  # srun turns SIGTERM into a kill; scancel reaches the agents themselves
            commands.cancel(self._site.job, "TERM" if name == "INT" else name)
        except JobEnds:
            pass  # Slurm has told the agents itself
        except SlurmError as error:
            say(f"could not pass on SIG{name}: {error}")
