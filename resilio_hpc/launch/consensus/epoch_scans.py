"""When an agent without a controller looks into the run directory, and whether it finds a pulse there. Pure."""

from __future__ import annotations

from resilio_hpc.launch.consensus.state import ElectionState
from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts

SCAN_S = 0.1  # between two scans of the run directory
SCANS_PER_S = 5000  # of all agents of a job together, since they share one file system
STILL_S = 2.0  # a pulse that does not change for so long has stopped


class EpochScans:
    """Scans for the newest epoch, one at a time, and the pulse of its controller as last seen."""

    def __init__(self, state: ElectionState, ports: SuccessionPorts) -> None:
        self._state = state
        self._ports = ports
        self._under_way = False
        self._pulse: tuple[int, int | None] = (0, None)  # epoch, pulse
        self._next = self._changed_at = ports.monotonic()

    def begin(self, now: float) -> None:
        """Scan at once: the controller was lost."""
        self._next = now
        self._pulse = (self._pulse[0], None)  # while no scan was made, the pulse may have moved

    def follow(self, epoch: int, now: float, patience_s: float) -> None:
        """Scan when the controller of this epoch had time to send something."""
        self._pulse, self._changed_at = (epoch, None), now
        self._next = now + patience_s

    def tick(self, now: float) -> None:
        """Scan, when it is time to."""
        if not self._under_way and now >= self._next:
            self._under_way = True
            self._next = now + max(SCAN_S, len(self._state.membership.voters.nodes) / SCANS_PER_S)
            self._ports.files.scan_epochs()

    @property
    def newest(self) -> int:
        """Return the newest epoch that a scan found."""
        return self._pulse[0]

    def claim_next(self, known: int) -> None:
        """Claim the first epoch after ``known`` that files make unique: an odd one."""
        self._under_way = True
        self._ports.files.claim_epoch(known + 1 + known % 2)

    def over(self) -> None:
        """Take note that the run directory has answered."""
        self._under_way = False

    def failed(self, now: float) -> None:
        """Try again later: the run directory did not answer."""
        self._under_way = False
        self._next = now + 1.0

    def is_news(self, epoch: int, pulse: int | None) -> bool:
        """Return whether the newest epoch, or its pulse, is another one than at the last scan."""
        return (epoch, pulse) != self._pulse

    def moved(self, epoch: int, pulse: int | None, now: float) -> bool:
        """Keep what is new; return whether the pulse of the same epoch moves."""
        moves = epoch == self._pulse[0] and self._pulse[1] is not None
        self._pulse, self._changed_at = (epoch, pulse), now
        return moves

    def still(self, now: float) -> bool:
        """Return whether the pulse has stopped, as far as a few scans show."""
        return now > self._changed_at + STILL_S

    def has_leader(self, now: float) -> bool:
        """Return whether the pulse moves, so that other nodes have a controller."""
        return now < self._changed_at + 10 * STILL_S
