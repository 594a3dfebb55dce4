"""``resilio health watch``: the node daemon."""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.cli.health.run import health_run_of
from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.daemon.report_intake import ReportIntake
from resilio_hpc.prolog_epilog.daemon.watch import Watch
from resilio_hpc.prolog_epilog.drain.fault_record import FaultRecord
from resilio_hpc.prolog_epilog.drain.node_drains import NodeDrains, SlurmDrainer
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.slurm.client import this_node
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.node_faults.ledger import FaultLedger
from resilio_hpc.slurm.orders.audit import DEFAULT_PATH, PATH_VARIABLE, AuditLog

POLL_S = 0.5
NAME_AGAIN_S = 60.0


def watch(options: argparse.Namespace) -> int:
    """Look for ever. SIGTERM or SIGINT ends it."""

    def said(text: str) -> None:
        print(text if not options.json else msgspec.json.encode({"said": text}).decode(), flush=True)

    drains = NodeDrains(_drainer(options), said) if options.drain != "off" else None
    health_run = health_run_of(options)
    intake = ReportIntake(options.reports, health_run.name, said, time.time) if options.reports is not None else None
    faults = FaultRecord(FaultLedger(options.faults), said) if options.faults is not None else None
    daemon = Watch(health_run, VerdictCache(options.directory), said, drains, intake, faults)
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ended.append(number))
    naming = Naming(daemon.rename, said)
    while not ended:
        naming.turn(time.monotonic())
        daemon.turn()
        if options.once:
            break
        if not ended:
            time.sleep(POLL_S)
    return 0


@dataclass
class Naming:
    """Asks Slurm, until it answers, for its name of the node. ``known`` is called with it."""

    known: Callable[[str], None]
    said: Callable[[str], None]
    ask: Callable[[], str] = this_node.node_name
    _next_s: float | None = -math.inf
    _trouble: str = ""

    def turn(self, now_s: float) -> None:
        """Ask if it is due; ``now_s``: monotonic seconds."""
        if self._next_s is None or now_s < self._next_s:
            return
        try:
            self.known(self.ask())
            self._next_s = None
        except SlurmError as error:
            self._next_s = now_s + NAME_AGAIN_S
            if str(error) != self._trouble:
                self._trouble = str(error)
                self.said(f"what Slurm calls this node is not known, its host name is used: {error}")


def _drainer(options: argparse.Namespace) -> SlurmDrainer:
    client = CommandClient()
    log = AuditLog(Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH))
    return SlurmDrainer(client, DrainWriter(client, drain_policy(options.policy), log, options.drain))
