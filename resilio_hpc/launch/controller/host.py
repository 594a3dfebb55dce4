"""The controller's I/O: the listening socket, the ledger, the verdict, and the status file.

Every agent has a host; the controller inside it exists only while the agent leads the newest epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import to_builtins

from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.consensus.connections import Callers, speaks_for
from resilio_hpc.launch.consensus.succession_ports import LivesIn
from resilio_hpc.launch.controller.checkpoints.slow_saves import SlowSaves
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.controller_status import status
from resilio_hpc.launch.controller.facts.state import (
    Action,
    ClaimWitness,
    Clock,
    ControllerConfig,
    Finish,
    KeepLimits,
    QueryHistory,
    Record,
    RecordEpoch,
    RunHistory,
    Send,
    StepDown,
)  # fmt: skip
from resilio_hpc.launch.controller.lease_guard import LinkGuard
from resilio_hpc.launch.controller.prober_host import ProberHost
from resilio_hpc.launch.controller.verdict_writer import VerdictWriter
from resilio_hpc.launch.process.announce import announcement
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import EpochRecord, Term
from resilio_hpc.launch.rundir import limit_files
from resilio_hpc.launch.rundir.run_claim import job_of
from resilio_hpc.launch.rundir.storage import Storage

STATUS_INTERVAL_S = 0.5
STATUS_AGENTS_PER_S = 4000  # agents per second: the long status of thousands is written less often
TICK_AGENTS_PER_S = 100_000  # agents per second: the Heartbeats of thousands wake the loop all the time
# tuples: a union would be built for each message
OF_ELECTIONS = (m.NoLeader, m.Vote)
OF_SAVES = (m.StepPersisted, m.PersistFailed, m.ManifestWritten)
ORDERS_TO_SAVE = (m.PersistStep, m.CommitStep)


class ControllerHost:
    """Runs a controller. ``serve`` reads the socket, ``tick`` lets time pass; neither blocks."""

    def __init__(
        self, context: zmq.Context[Any], keys: wire.Keys, bind_host: str, ledger: Ledger, storage: Storage,
        counters: wire.Counters, say: Callable[[str], None], agent: LivesIn, job: str,
        notify: Callable[[str, dict[str, Any]], None] = lambda _kind, _fields: None, clock_ahead_s: float = 0.0,
        log: Path = Path("/dev/null"),
    ) -> None:  # fmt: skip
        """Take what the host shares with its agent.

        ``clock_ahead_s``: seconds by which slurmctld's clock is ahead of this node's. ``log``: of tests of nodes.
        """
        self.clock_ahead_s = clock_ahead_s
        self.socket, self.port = wire.listen(context, keys, bind_host)
        self.controller: Controller | None = None
        self.absent: tuple[str, ...] = ()  # nodes of the job that had no agent when the verdict was decided
        self._callers = Callers()
        self._encoded: tuple[m.ToAgent | None, bytes] = (None, b"")  # a message to many agents is encoded once
        self._ledger = ledger
        self._storage = storage
        self._counters = counters
        self._say = say
        self._agent = agent
        self._job = job
        self._notify = notify
        self._slurm_job = "" if job.startswith("local-") else job_of(job)
        self._guard = LinkGuard("", 0.0, True)
        self._saves = SlowSaves()
        self._tests = ProberHost(self.say_to, storage, bind_host, log, int(job.startswith("local-")))
        self._behind = False  # unread messages are left from the last turn
        self._pulse = 0
        self._next_tick = self._next_status = 0.0
        self._ask_past_at: float | None = None
        self._record_epoch_at: float | None = None
        self._verdict = VerdictWriter(storage, self._verdict_written)

    def begin(self, config: ControllerConfig, term: Term) -> None:
        """Become the controller of an epoch."""
        self._ask_past_at = self._record_epoch_at = None
        self._verdict.forget()
        controller = self.controller = Controller(config, term, Clock(time.monotonic, time.time))
        self._guard = LinkGuard(self._slurm_job, time.monotonic(), term.first)
        controller.run.suspended = not self._guard.may_lead(time.monotonic())
        self._saves = SlowSaves()
        self._tests.begin(controller)
        self._carry_out(controller.begin())
        self._ask_past()

    def _ask_past(self) -> None:
        self._storage.request("past", self._learn_past)

    def _learn_past(self, reply: dict[str, Any] | None) -> None:
        if self.controller is None:
            return
        if reply is None:  # the file system failed, so no step to restore is known
            self._ask_past_at = time.monotonic() + 1.0
        elif not self._superseded(reply["epoch"]):
            self._carry_out(self.controller.inform(RunHistory.of(reply)))

    def serve(self) -> None:
        """Take the messages that have arrived."""
        for frames in wire.receive_all(self.socket):
            try:
                message = m.to_controller.decode(frames[1]) if len(frames) == 2 else None
                if message is None or not speaks_for(frames[0], message.node):
                    raise WireError("not two frames, or in another node's name")
            except WireError:
                self._counters.dropped += 1
                continue
            self._callers.heard(message.node, frames[0])
            if isinstance(message, OF_ELECTIONS):
                self._agent.peer_said(message)
            elif self.controller is None:
                if isinstance(message, m.Hello | m.Heartbeat):
                    self._agent.taken_for_controller(message)
            elif not self._superseded(message.epoch):
                self._carry_out(self.controller.handle(message))
                if isinstance(message, OF_SAVES):
                    self._saved(message)
        self._behind = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _superseded(self, newest: int) -> bool:
        """Return whether another node has a newer epoch, so that this one is no controller any more."""
        if self.controller is None or newest <= self.controller.run.epoch:
            return False
        self.step_down(f"epoch {newest} has begun")
        return True

    def step_down(self, reason: str, since: float | None = None, outvoted: bool = False) -> None:
        """End the controller. It had no quorum since ``since`` (monotonic seconds)."""
        if self.controller is not None:
            run = self.controller.run
            self._write("stepped_down", epoch=run.epoch, reason=reason)
            self.controller = None
            self._tests.close()
            self._agent.stepped_down(run.epoch, run.supported_since if since is None else since, outvoted)

    def tick(self) -> None:
        """Let the controller do what is due."""
        controller, now = self.controller, time.monotonic()
        if controller is None or now < self._next_tick:
            return
        self._next_tick = now + len(controller.run.agents) / TICK_AGENTS_PER_S
        self._carry_out(controller.tick(self._behind) + self._tests.tick())
        self._write_what_is_due(now)

    def _write_what_is_due(self, now: float) -> None:
        if self.controller is None:
            return
        run = self.controller.run
        if self._ask_past_at is not None and now > self._ask_past_at:
            self._ask_past_at = None
            self._ask_past()
        if self._record_epoch_at is not None and now > self._record_epoch_at:
            self._record_epoch()
        self._verdict.tick(now)
        self._saves.abandoned(run.round)
        if (overdue := self._saves.overdue(now)) is not None:
            self._write("save_overdue", **overdue)
        if now >= self._next_status:
            self._next_status = now + max(STATUS_INTERVAL_S, len(run.agents) / STATUS_AGENTS_PER_S)
            self._storage.request("status", lambda reply: self._learn_newest(reply, now), status=self._status())
        self._guard.tick(now)
        run.suspended = not self._guard.may_lead(now)
        if self._guard.changed(now):
            self._write("suspended" if run.suspended else "resumed", epoch=run.epoch)

    def _saved(self, answer: m.StepPersisted | m.PersistFailed | m.ManifestWritten) -> None:
        if (resumed := self._saves.answered(answer, time.monotonic())) is not None:
            self._write("save_resumed", **resumed)

    def _learn_newest(self, reply: dict[str, Any] | None, asked: float) -> None:
        if reply is not None and not self._superseded(reply["epoch"]):
            self._guard.pulse_written(asked)
            self._take_changes(reply)
            self._tests.ordered(reply.get("orders"))

    def _take_changes(self, reply: dict[str, Any]) -> None:
        """Pass on the user's limits and the job's end, which may change while the job runs."""
        if self.controller is None:
            return
        self.controller.hangs.limits.ordered(limit_files.parse(reply.get("limit_order"), limit_files.LimitOrder))
        run, end_time = self.controller.run, reply.get("end_time")
        limit = end_time + self.clock_ahead_s if end_time is not None and math.isfinite(end_time) else None
        if end_time is not None and limit != run.config.end_time:
            self._write("end_time", end_time=limit, before=run.config.end_time)
            run.config = msgspec.structs.replace(run.config, end_time=limit)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self.say_to(action.node, action.message)
                case Record():
                    self._write(action.kind, **action.fields)
                case QueryHistory():
                    self._ask_past()
                case RecordEpoch():
                    self._record_epoch()
                case ClaimWitness():
                    self._claim_witness(action.witness)
                case KeepLimits():
                    self._storage.request("keep_limits", limits=msgspec.to_builtins(action.limits))
                case StepDown():
                    self.step_down(action.reason, action.since, action.outvoted)
                case Finish():
                    self._finish(action)
                case _:  # of a test of nodes
                    self._tests.carry_out(action)

    def _claim_witness(self, witness: str) -> None:
        controller = self.controller
        assert controller is not None

        def answer(reply: dict[str, Any] | None) -> None:
            if self.controller is controller:
                self._carry_out(controller.witness_claimed(witness, None if reply is None else reply["holder"]))

        self._storage.request("witness", answer, witness=witness, node=controller.run.node)

    def _record_epoch(self) -> None:
        """Create the epoch's file; try again until the file system answers."""
        controller, self._record_epoch_at = self.controller, None
        if controller is None:
            return
        term = controller.run.term

        def answer(reply: dict[str, Any] | None) -> None:
            if self.controller is not controller:
                return
            if reply is None:
                self._record_epoch_at = time.monotonic() + 1.0
            elif reply["won"]:
                self._carry_out(controller.epoch_recorded())
            else:
                self.step_down("another controller holds the same epoch")

        record = to_builtins(EpochRecord(term.epoch, term.node, term.endpoint, self._job))
        self._storage.request("claim", answer, record=record)

    def say_to(self, node: str, message: m.ToAgent) -> None:
        """Send to an agent that called this one."""
        name = self._callers.name_of(node)
        if name is None:
            return
        if isinstance(message, ORDERS_TO_SAVE):
            self._saves.ordered(node, message, time.monotonic())
        if message is not self._encoded[0]:
            try:
                self._encoded = (message, m.to_agent.encode(message))
            except WireError as error:
                self._say(f"a {type(message).__name__} to {node} cannot be sent: {error}")
                return
        wire.send(self.socket, [name, self._encoded[1]])

    def _finish(self, finish: Finish) -> None:
        if self.controller is not None:
            run = self.controller.run
            self.absent = tuple(node for node in run.config.expected if node not in run.agents)
        self._write("verdict", verdict=finish.verdict, reason=finish.reason, **finish.fields)
        verdict = {"verdict": finish.verdict, "exit_code": finish.exit_code, "reason": finish.reason, **finish.fields}
        self._verdict.write(verdict, time.monotonic())

    def _verdict_written(self, newest_epoch: int) -> None:
        if self.controller is not None and not self._superseded(newest_epoch):
            self._carry_out(self.controller.verdict_written())

    def _write(self, kind: str, /, **fields: Any) -> None:
        """Write a ledger entry; print some of them, and pass on those that --notify wants."""
        self._ledger.append(kind, **fields)
        line = announcement(kind, fields)
        if line:
            self._say(line)
        self._notify(kind, fields)

    def _status(self) -> dict[str, Any]:
        assert self.controller is not None
        self._pulse += self.controller.run.leads
        stalled_s, slow = self.controller.hangs.stalled_s(), self.controller.slow.told
        return status(self.controller.run, self._pulse, self._counters, stalled_s, slow)
