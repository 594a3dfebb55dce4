"""What an agent asks of the run directory for an election. A child asks, which may hang in the agent's place."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.config.agent_settings import AgentSettings
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir.storage import Storage


class AgentFiles:
    """The real ``ElectionFiles``. Answers go to the core.

    ``abandoned``: this job has a verdict, though it had no controller in the end.
    """

    def __init__(self, settings: AgentSettings, storage: Storage, endpoint: str, core: Callable[[], AgentCore]) -> None:
        """``endpoint``: where others reach this node as controller. ``core``: gets the answers."""
        self.abandoned = False
        self._settings = settings
        self._storage = storage
        self._endpoint = endpoint
        self._core = core

    def scan_epochs(self) -> None:
        """Ask for the newest epoch record."""
        self._storage.request("scan", self._scanned)

    def _scanned(self, reply: dict[str, Any] | None) -> None:
        if reply is None:
            self._core().storage_failed()
        else:
            record = EpochRecord(**reply["record"]) if reply["record"] else None
            self.abandoned = reply["verdict"] is not None
            self._core().scanned(record, reply["pulse"], reply["verdict"])

    def claim_epoch(self, epoch: int) -> None:
        """Try to create the epoch's record."""
        record = EpochRecord(epoch, self._settings.node, self._endpoint, self._settings.job)

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self._core().storage_failed()
            else:
                self._core().claimed(epoch, reply["won"])

        self._storage.request("claim", answer, record=to_builtins(record))

    def claim_witness(self, witness: str) -> None:
        """Create the witness, unless it is there."""

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self._core().storage_failed()
            else:
                self._core().witness_claimed(witness, reply["holder"])

        self._storage.request("witness", answer, witness=witness, node=self._settings.node)

    def abandon(self, epoch: int, reason: str) -> None:
        """Write a verdict for a job that has no controller."""
        name, code = ("needs_new_job", 75) if self._settings.chained else ("quorum_lost", 1)
        verdict = {"verdict": name, "exit_code": code, "reason": reason, "epoch": epoch}

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is not None and reply["verdict"] is not None:
                self.abandoned = True
                self._core().abandoned(*reply["verdict"])
            elif reply is None and self._storage.gone:  # no process will write one any more
                self._core().abandoned(name, code)

        self._storage.request("verdict", answer, verdict=verdict)


def tell_supervisor(settings: AgentSettings, verdict: str, exit_code: int) -> None:
    """Write on this machine how the run ended: the run directory may not answer."""
    if settings.last_words:
        told = json.dumps({"verdict": verdict, "exit_code": exit_code}).encode()
        with contextlib.suppress(OSError):  # the supervisor has ended already
            write_atomic(Path(settings.last_words), told, durable=False)
