"""What an agent asks of the run directory, through a child that may hang in its place; answers go to the core."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.launch.protocol.vote import EpochRecord

if TYPE_CHECKING:
    from resilio_hpc.launch.agent.agent_core import AgentCore
    from resilio_hpc.launch.config.agent_settings import AgentSettings
    from resilio_hpc.launch.controller.host import ControllerHost
    from resilio_hpc.launch.rundir.io_worker import Storage


class AgentFiles:
    """The part of ``agent_core.Ports`` that reads and creates files."""

    settings: AgentSettings
    storage: Storage
    core: AgentCore
    host: ControllerHost
    abandoned = False  # there was no controller in the end

    def scan_epochs(self) -> None:
        """Ask for the newest epoch record."""
        self.storage.request("scan", self._scanned)

    def _scanned(self, reply: dict[str, Any] | None) -> None:
        if reply is None:
            self.core.storage_failed()
        else:
            record = EpochRecord(**reply["record"]) if reply["record"] else None
            self.abandoned = reply["verdict"] is not None
            self.core.scanned(record, reply["pulse"], reply["verdict"])

    def claim_epoch(self, epoch: int) -> None:
        """Try to create the epoch's record."""
        endpoint = f"{self.settings.address}:{self.host.port}"
        record = EpochRecord(epoch, self.settings.node, endpoint, self.settings.job)

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self.core.storage_failed()
            else:
                self.core.claimed(epoch, reply["won"])

        self.storage.request("claim", answer, record=asdict(record))

    def claim_witness(self, witness: str) -> None:
        """Create the witness, unless it is there."""

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self.core.storage_failed()
            else:
                self.core.witness_claimed(witness, reply["holder"])

        self.storage.request("witness", answer, witness=witness, node=self.settings.node)

    def tell_supervisor(self, verdict: str, exit_code: int) -> None:
        """Leave word on this machine of how the run ended: the run directory may be gone."""
        if self.settings.last_words:
            told = json.dumps({"verdict": verdict, "exit_code": exit_code}).encode()
            with contextlib.suppress(OSError):  # the supervisor has closed already
                write_atomic(Path(self.settings.last_words), told, durable=False)

    def abandon(self, epoch: int, reason: str) -> None:
        """Write a verdict for a job in which nobody leads."""
        name, code = ("needs_new_job", 75) if self.settings.chained else ("quorum_lost", 1)
        verdict = {"verdict": name, "exit_code": code, "reason": reason, "epoch": epoch}

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is not None and reply["verdict"] is not None:
                self.abandoned = True
                self.core.abandoned(*reply["verdict"])
            elif reply is None and self.storage.gone:  # nobody will ever write one
                self.core.abandoned(name, code)

        self.storage.request("verdict", answer, verdict=verdict)
