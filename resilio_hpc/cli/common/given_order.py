"""An order that a command gives to a run that trains, and what the run's ledger says of it from then on."""

from __future__ import annotations

import getpass
import secrets
import time
from pathlib import Path

from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.launch.rundir import user_orders
from resilio_hpc.launch.rundir.user_orders import Kind, UserOrder

TAKEN_S = 60.0  # for the controller to take the order
LOOK_S = 0.2


class GivenOrder:
    """One order. ``is_taken``: a controller carries it out; ``is_answered``: to be set with its result."""

    def __init__(
        self, run: Path, kind: Kind, replace: bool = False, fault: str = "", rank: int = -1, force: bool = False
    ) -> None:
        """Give it. Raises UsageError where it cannot be given, ResilioError where no job of the run runs.

        ``fault``, ``rank``, ``force``: of a drill.
        """
        self._run = run
        self._order = UserOrder(kind, secrets.token_hex(8), getpass.getuser(), replace, fault, rank, force, time.time())
        self._until = time.monotonic() + TAKEN_S
        self.is_taken = self.is_answered = self._is_over = False
        try:
            self._reader = LedgerReader(run / "ledger")
            before = [event.kind for event in self._reader.read_new() if event.kind in ("launch", "launch_ends")]
            if before[-1:] == ["launch_ends"]:
                raise ResilioError(f"{run} does not run now: its last job has ended")
            user_orders.write(run, self._order)
        except OSError as error:
            raise UsageError(f"{run}: the order cannot be given: {error.strerror}") from None

    @property
    def mark(self) -> str:
        """Return what tells this order from others."""
        return self._order.mark

    def is_of_this(self, event: Event) -> bool:
        """Return whether an event names this order."""
        return Fields.of(event.fields).text("asked") == self.mark

    def look(self) -> list[Event]:
        """Return the new events of the ledger, after a moment. Raises ResilioError where no answer will come."""
        if self._is_over and not self.is_answered:
            raise ResilioError("the run ended before the order was carried out")
        time.sleep(LOOK_S)
        found = self._reader.read_new()
        self.is_taken = self.is_taken or any(map(self.is_of_this, found))
        self._is_over = self._is_over or any(event.kind == "launch_ends" for event in found)
        if not self.is_taken and time.monotonic() > self._until:
            user_orders.remove(self._run, self._order.kind, self.mark)
            raise ResilioError(f"no controller took the order within {TAKEN_S:.0f} s: does {self._run} run now?")
        return found
