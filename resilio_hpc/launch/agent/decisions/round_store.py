"""The rendezvous store of a round, where this node is asked to open it. Pure."""

from __future__ import annotations

from resilio_hpc.launch.agent.decisions.agent_ports import Ports
from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.protocol import messages as m


class RoundStore:
    """``round``: that of the store that was asked for here, -1 without one."""

    def __init__(self, ports: Ports, reports: ControllerReports) -> None:
        self.round = -1
        self._port = 0  # 0: not open yet
        self._ports = ports
        self._reports = reports

    def ask(self, round_number: int) -> None:
        """Open the store of a round; where it is open, say so again."""
        if self.round != round_number:
            self.round, self._port = round_number, 0
            self._ports.services.open_store(round_number)
        elif self._port:
            self._say()

    def ready(self, round_number: int, port: int) -> None:
        """Take note that the store of a round is open."""
        if round_number == self.round:
            self._port = port
            self._say()

    def lost(self) -> None:
        """Take note that the store is gone."""
        self.round, self._port = -1, 0

    def _say(self) -> None:
        self._ports.to_controller(m.StoreOpened(self._reports.node, self._reports.epoch, self.round, self._port))
