"""The agent's device check: looks at the node's GPUs at each (re)start, and evicts bad ones (RES-10).

At each start of ranks, and whenever ranks were stopped, ``device_evidence`` gathers what speaks against a device,
within ``LOOK_S``; ranks wait for it, and no longer. An evicted device stays so for as long as the job has the node.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.gpus import eviction
from resilio_hpc.launch.gpus.device_errors import hardware_error
from resilio_hpc.launch.gpus.device_look import DeviceLook
from resilio_hpc.launch.gpus.devices import VisibleDevices, local_world_size, read_devices, visible_devices
from resilio_hpc.launch.gpus.eviction import Evicted, Rules, Strikes
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir.node_memory import NodeMemory
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.prolog_epilog.base import reports
from resilio_hpc.prolog_epilog.base.node import uptime_s
from resilio_hpc.prolog_epilog.base.reports import Report

LOOK_S = 10.0
FRESH_S = 60.0  # seconds; an older look says nothing about a start now
TAIL_BYTES = 8192
SPOOL_VARIABLE = "RESILIO_REPORT_SPOOL"  # where a site's daemon takes reports, if not at the usual place
EVICTED_VARIABLE = "RESILIO_EVICTED_DEVICES"  # the name that Slurm's task prolog uses


class Kept(msgspec.Struct):
    """What a restarted agent of this node has to know."""

    since_s: float  # when the job's first agent came, in seconds since boot
    evicted: tuple[Evicted, ...] = ()
    strikes: Strikes = msgspec.field(default_factory=Strikes)


class DeviceEviction:
    """Evicts bad devices. ``slots``: ranks that the node's good devices allow. Off with ``--evict-devices off``."""

    def __init__(self, node: NodeContext, memory: NodeMemory) -> None:
        """Look at the devices, and wait for the result."""
        self._node = node
        self._memory = memory
        options = node.options
        self.slots = self._all = local_world_size(options.nproc_per_node, read_devices(os.environ))
        self._visible: VisibleDevices = visible_devices(os.environ)
        self._on = options.devices.evict_devices != "off" and bool(self._visible.entries)
        self._acts = options.devices.evict_devices == "on" and options.mode == Mode.RECOVER
        self._rules = Rules(options.devices.min_devices, options.devices.device_unit)
        self._look: DeviceLook | None = None
        self._looked_at = float("-inf")
        self._waiting: tuple[LocalRound, m.Start] | None = None
        self._failed: dict[str, str] = {}  # of this round: device entry → the error of its rank
        self._round = -1
        self._notes: set[str] = set()
        self._core: AgentCore | None = None
        self._start_ranks: Callable[[LocalRound, m.Start], None] | None = None
        self._kept = Kept(0.0)
        if self._on:
            self._kept = memory.kept("devices", Kept) or Kept(uptime_s())
            self._recall()
            self._settle()

    def attach(self, core: AgentCore, start_ranks: Callable[[LocalRound, m.Start], None]) -> None:
        """From now on, tell ``core`` what is evicted, and start ranks that waited for a look."""
        self._core = core
        self._start_ranks = start_ranks

    @property
    def evicted(self) -> tuple[Evicted, ...]:
        """Return the devices that are hidden from ranks."""
        return self._kept.evicted if self._acts else ()

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for ranks that show only the good devices; none where all are good."""
        if not self.evicted:
            return {}
        left = eviction.visible_left(self._visible.entries, self.evicted)
        gone = ",".join(one.device or one.entry for one in self.evicted)
        return {self._visible.variable: left, EVICTED_VARIABLE: gone}

    def filenos(self) -> tuple[int, ...]:
        """Return the descriptors to poll."""
        return (self._look.fileno(),) if self._look is not None else ()

    def _recall(self) -> None:
        """Evict the devices that an earlier agent of this node evicted."""
        self._memory.keep("devices", self._kept)
        if self._acts:
            self.slots = eviction.slots_left(self._all, self._visible.entries, self._kept.evicted, self._rules)

    def _settle(self) -> None:
        """Look, and wait for the result, before the node is offered to the controller."""
        self.look()
        while self._look is not None:
            select.select([self._look.fileno()], [], [], 0.1)
            self.tick()

    # -- looking -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Begin to look at the devices, unless that is under way."""
        if self._on and self._look is None:
            self._look = DeviceLook(self._kept.since_s, self._node.local_dir / "devices.log", LOOK_S)

    def tick(self) -> None:
        """Take the result of a look; let ranks that waited for it start."""
        look = self._look
        if look is None or not look.over():
            return
        self._look = None
        self._looked_at = time.monotonic()
        self._tell_notes(look)
        new = self._judge(look)
        if new:
            self._evict(new)
        waiting, self._waiting = self._waiting, None
        core, start_ranks = self._core, self._start_ranks
        if waiting is None or core is None or start_ranks is None or core.ranks.local is not waiting[0]:
            return
        if not self._refuses(waiting[0]):
            start_ranks(*waiting)

    def holds(self, local: LocalRound, start: m.Start) -> bool:
        """Return whether ranks may not start: their devices are being looked at, or too few are good."""
        if not self._on:
            return False
        if self._round != local.number:
            self._round = local.number
            self._failed = {}
        if self._look is None and time.monotonic() - self._looked_at > FRESH_S:
            self.look()
        if self._look is not None and self._acts:
            self._waiting = (local, start)
            return True
        return self._refuses(local)

    def ranks_stop(self, for_good: bool) -> None:
        """Take note that a round's ranks are being stopped. ``for_good``: at the end of the run."""
        self._waiting = None
        if self._on and not for_good:
            if self._kept.strikes.round_over(self._round, self._failed):
                self._memory.keep("devices", self._kept)
            self._failed = {}
            self.look()

    def rank_failed(self, local_rank: int, said: tuple[str, str], log: Path | None) -> None:
        """Take note that a rank ended by itself. ``said``: its error and traceback; ``log``: its standard error."""
        if not self._on or self._all > len(self._visible.entries):
            return  # the rank's device is not known
        in_use = [entry for entry in self._visible.entries if entry not in {one.entry for one in self.evicted}]
        text = hardware_error("\n".join([*said, _tail(log)]))
        if text and local_rank < len(in_use):
            self._failed[in_use[local_rank]] = text

    # -- what was found ----------------------------------------------------------------------------------------

    def _judge(self, look: DeviceLook) -> tuple[Evicted, ...]:
        entries = self._visible.entries
        found = [evidence for said in look.said for evidence in said.evidence]
        identities = next((said.identities for said in reversed(look.said) if said.identities), ())
        new = eviction.newly_evicted(found, entries, identities, self._kept.evicted)
        gone = {one.entry for one in (*self._kept.evicted, *new)}
        struck = [entry for entry in self._kept.strikes.evicts() if entry not in gone]
        return new + tuple(eviction.of_strikes(self._kept.strikes, entry, identities) for entry in struck)

    def _evict(self, new: tuple[Evicted, ...]) -> None:
        node = self._node
        self._kept.evicted += new
        self._memory.keep("devices", self._kept)
        left = eviction.slots_left(self._all, self._visible.entries, self._kept.evicted, self._rules)
        for one in new:
            node.record(
                "device_evicted", device=one.device or one.entry, index=one.index, entry=one.entry, check=one.check,
                evidence=one.text, source=one.source, slots=left, of=self._all, acted=self._acts,
            )  # fmt: skip
        node.say(eviction.words(node.name, new, left, self._all, self._rules, self._acts))
        if self._acts:
            self._report(new)
            self.slots = left
            if self._core is not None:
                self._core.offer(left, len(self._kept.evicted))

    def _report(self, new: tuple[Evicted, ...]) -> None:
        """Report to root's health checks, where a node daemon takes reports; it knows its own verdicts."""
        spool = Path(os.environ.get(SPOOL_VARIABLE, reports.SPOOL))
        for one in new:
            if one.source != "verdict":
                why = f"{eviction.name(one)} is out of use in job {self._node.settings.job}: {one.check}: {one.text}"
                with contextlib.suppress(UsageError):  # no daemon takes reports here
                    reports.write(spool, Report(self._node.name, why[:1000]))

    def _refuses(self, local: LocalRound) -> bool:
        """Return whether the round cannot start here, since a device was evicted after it was chosen; then tell so."""
        if len(local.ranks) <= self.slots or not self.evicted:
            return False
        gone = ", ".join(f"{eviction.name(one)} ({one.check})" for one in self.evicted)
        text = f"out of use: {gone}; {self.slots} of {self._all} ranks can run here"
        if self._core is not None:
            self._core.ranks.spawn_failed(self.slots, text, time.time())
        return True

    def _tell_notes(self, look: DeviceLook) -> None:
        """Record, once, why something could not be looked at."""
        for text in look.notes():
            if text not in self._notes:
                self._notes.add(text)
                self._node.record("devices_unclear", reason=text)

    def close(self) -> None:
        """End a look that is under way."""
        if self._look is not None:
            self._look.end()
            self._look = None


def _tail(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
