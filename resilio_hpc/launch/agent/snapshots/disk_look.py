"""The agent's look at what its node's own disk holds, so that its ranks come to where their state is (RES-11).

The controller waits a moment for the answer. A disk that hangs or fails has nothing, which is said as well.
"""

from __future__ import annotations

import msgspec

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.launch.agent.decisions.controller_reports import ControllerReports
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.process.helper_look import HelperLook
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.node_context import NodeContext

LOOK_S = 20.0


class DiskLook:
    """Looks once, at the start. Without ``--local-checkpoints`` it does nothing."""

    def __init__(self, node: NodeContext, reports: ControllerReports) -> None:
        self._node = node
        self._reports = reports
        self._look: HelperLook | None = None
        self._found: tuple[OwnCopy, ...] = ()

    def start(self) -> None:
        """Begin to look."""
        node, local = self._node, self._node.options.checkpoints.local_checkpoints
        if local:
            argv = [*bootstrap.command("ckpt.tiers.own_copies"), local, str(node.run.path / "checkpoints"), node.name]
            self._look = HelperLook(argv, node.local_dir / "own-copies.log", LOOK_S, self._take)

    def filenos(self) -> tuple[int, ...]:
        """Return the descriptors to poll."""
        return (self._look.fileno(),) if self._look is not None else ()

    def _take(self, line: bytes) -> None:
        try:
            self._found = msgspec.json.decode(line, type=tuple[OwnCopy, ...])
        except msgspec.MsgspecError:
            pass  # half a line of a process that was killed

    def tick(self) -> None:
        """Report what was found, once the look is over."""
        if self._look is not None and self._look.over():
            self._look = None
            self._reports.tell_of_node(m.DiskSeen(self._node.name, self._reports.epoch, self._found))

    def close(self) -> None:
        """End a look that is under way."""
        if self._look is not None:
            self._look.end()
            self._look = None
