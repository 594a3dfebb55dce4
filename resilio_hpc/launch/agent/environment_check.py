"""The agent's look at its node's environment, at the start and after an error (RES-3).

It runs beside the start. The first ranks wait for one answer alone, and only with ``--data-path``: whether these paths
are there. Where they or the script are not, no ranks start here, and the controller takes another node.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.process.helper_look import HelperLook
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext

LOOK_S = 20.0
HOLDS_S = 8.0  # ranks wait for the first line no longer
AGAIN_S = 30.0  # between two looks


class NodeReport(msgspec.Struct, frozen=True):
    """A line of ``environment.facts``."""

    unfit: str = ""
    facts: dict[str, str] | None = None
    notes: tuple[str, ...] = ()


class EnvironmentCheck:
    """Looks at the node, reports to the controller, and holds the first ranks back until their files are known."""

    def __init__(
        self, node: NodeContext, reports: ControllerReports, resume: Callable[[LocalRound, m.Start], None]
    ) -> None:
        """``resume``: starts the ranks that were held back."""
        self._node = node
        self._reports = reports
        self._resume = resume
        self._on = node.options.environment.check_environment
        self._look: HelperLook | None = None
        self._began = 0.0
        self._first = True  # the first look
        self._answered = not node.options.environment.data_paths
        self._unfit = ""
        self._waiting: tuple[LocalRound, m.Start] | None = None

    def start(self) -> None:
        """Begin to look."""
        if not self._on or self._look is not None:
            return
        options, cwd = self._node.options, Path(self._node.settings.cwd or Path.cwd())
        request = json.dumps({
            "script": str(cwd / options.script) if options.kind == "script" else "",
            "data_paths": [str(cwd / path) for path in options.environment.data_paths],
            "run_dir": str(self._node.run.path),
        })  # fmt: skip
        argv = [*bootstrap.command("launch.environment.facts"), request]
        self._look = HelperLook(argv, self._node.local_dir / "environment.log", LOOK_S, self._take)
        self._began = time.monotonic()

    def filenos(self) -> tuple[int, ...]:
        """Return the descriptors to poll."""
        return (self._look.fileno(),) if self._look is not None else ()

    def _take(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=NodeReport)
        except msgspec.MsgspecError:
            return  # half a line of a process that was killed
        self._answered = True
        self._unfit = report.unfit if self._first else ""
        if report.facts is None and not report.unfit:
            return  # the next line says more
        self._reports.tell_of_node(m.EnvironmentSeen(
            self._node.name, self._reports.epoch, report.facts or {}, report.unfit[:300], self._first,
            tuple(note[:200] for note in report.notes),
        ))  # fmt: skip

    def tick(self) -> None:
        """Take what the look has found; let ranks start that waited for it."""
        now = time.monotonic()
        if self._look is not None and self._look.over():
            self._look, self._first = None, self._first and bool(self._unfit)
        if self._look is None and self._unfit and now - self._began > AGAIN_S:
            self.start()  # a file system may be mounted late
        if self._look is None or now - self._began > HOLDS_S:
            self._answered = True
        if self._waiting is not None and self._answered and not self._unfit:
            waiting, self._waiting = self._waiting, None
            self._resume(*waiting)

    def holds(self, local: LocalRound, start: m.Start) -> bool:
        """Return whether ranks may not start: it is not known yet, or the node lacks what they need."""
        if not self._on or (self._answered and not self._unfit):
            return False
        self._waiting = (local, start)
        return True

    def ranks_stop(self, for_good: bool) -> None:
        """Take note that a round's ranks are being stopped: look again, for their end may have come from the node."""
        self._waiting = None
        if not for_good and self._look is None and time.monotonic() - self._began > AGAIN_S:
            self.start()

    def close(self) -> None:
        """End a look that is under way."""
        if self._look is not None:
            self._look.end()
            self._look = None
