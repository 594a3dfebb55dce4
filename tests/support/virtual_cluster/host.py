"""What ``ControllerHost`` does for a controller, on virtual sockets and a virtual run directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from resilio_hpc.launch.consensus.connections import Callers
from resilio_hpc.launch.controller import verdict_writer
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.intents import PauseAndTest
from resilio_hpc.launch.controller.facts.state import (
    Action,
    ClaimWitness,
    Clock,
    EndTest,
    Finish,
    KeepLimits,
    QueryHistory,
    Record,
    RecordEpoch,
    RunHistory,
    RunTest,
    Send,
    StartTest,
    StepDown,
)
from resilio_hpc.launch.controller.host import STATUS_INTERVAL_S
from resilio_hpc.launch.controller.lease_guard import LinkGuard
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import EpochRecord, Term
from resilio_hpc.launch.rundir.limit_files import KeptLimits
from tests.support.virtual_cluster.directory import JOB
from tests.support.virtual_cluster.network import Connection
from tests.support.virtual_cluster.probers import VirtualProbers

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.world import World


class VirtualHost:
    """The listening end of an agent."""

    def __init__(self, world: World, agent: VirtualAgent) -> None:
        self.controller: Controller | None = None
        self._world = world
        self._agent = agent
        self._callers = Callers()
        self._connections: dict[bytes, Connection] = {}  # by name
        self._verdict: dict[str, Any] | None = None
        self._verdict_due = self._next_verdict = 0.0
        self._next_status = 0.0
        self._guard = LinkGuard("", 0.0, True)
        self._probers: VirtualProbers | None = None

    def begin(self, term: Term) -> None:
        """Become controller."""
        self._verdict = None
        self.controller = Controller(self._world.config, term, Clock(self._agent.monotonic, self._agent.unix))
        controller = self.controller
        self._probers = VirtualProbers(
            self._world, controller, lambda act: self._agent.event(lambda: self._let(controller, act))
        )
        self._guard = self._world.link_guard(self._agent, term.first)
        self.controller.run.suspended = not self._guard.may_lead(self._agent.monotonic())
        self._carry_out(self.controller.begin())
        self._ask_past()

    def test_nodes(self, asked: PauseAndTest) -> None:
        """A user orders a test."""
        controller = self.controller
        if controller is not None:
            self._let(controller, lambda: controller.let(lambda: controller.tests.begin(asked)))

    def _let(self, controller: Controller, act: Callable[[], list[Action]]) -> None:
        if self.controller is controller:
            self._carry_out(act())

    def heard(self, message: m.ToController, connection: Connection) -> None:
        """A message has arrived at our socket."""
        self._callers.heard(message.node, connection.name)
        self._connections[connection.name] = connection
        if isinstance(message, m.NoLeader | m.Vote):
            self._agent.core.peer_said(message)
        elif self.controller is None:
            if isinstance(message, m.Hello | m.Heartbeat):
                self._agent.core.taken_for_controller(message)
        elif not self._superseded(message.epoch):
            if isinstance(message, m.Heartbeat):
                self._world.watch.supports(self.controller, message)
            self._carry_out(self.controller.handle(message))

    def say_to(self, node: str, message: m.ToAgent) -> None:
        """Send to an agent that called this one."""
        connection = self._connections.get(self._callers.name_of(node) or b"")
        if connection is not None:
            self._world.network.to_caller(connection, lambda: connection.caller.hears(message))

    def step_down(self, reason: str, since: float | None = None, outvoted: bool = False) -> None:
        """There is no controller here any more."""
        if self.controller is not None:
            self._world.record("stepped_down", {"node": self._agent.node, "reason": reason})
            epoch, since = self.controller.run.epoch, self.controller.run.supported_since if since is None else since
            self.controller = None
            self._agent.core.stepped_down(epoch, since, outvoted)

    def tick(self) -> None:
        """Let time pass."""
        if self.controller is None:
            return
        self._carry_out(self.controller.tick())
        now = self._agent.monotonic()
        if self._verdict is not None and self.controller is not None and now >= self._next_verdict:
            self._write_verdict()
        if self.controller is not None and now >= self._next_status:
            self._next_status = now + STATUS_INTERVAL_S
            epoch, leads = self.controller.run.epoch, self.controller.run.leads
            self._world.storage.ask(
                self._agent,
                lambda: self._world.directory.write_status(epoch, leads),
                lambda newest: self._learn_newest(newest, now),
            )
        self._guard.tick(now)
        if self.controller is not None:
            self.controller.run.suspended = not self._guard.may_lead(now)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if isinstance(action.message, m.Start):
                    self._world.watch.decides(action.message)
                self.say_to(action.node, action.message)
            elif isinstance(action, Record):
                self._world.record(action.kind, action.fields)
            elif isinstance(action, QueryHistory):
                self._ask_past()
            elif isinstance(action, RecordEpoch):
                self._record_epoch()
            elif isinstance(action, ClaimWitness):
                self._claim_witness(action.witness)
            elif isinstance(action, KeepLimits):
                self._keep(action.limits)
            elif isinstance(action, StartTest | RunTest | EndTest):
                assert self._probers is not None
                self._probers.carry_out(action)
            elif isinstance(action, StepDown):
                self.step_down(action.reason, action.since, action.outvoted)
            else:
                self._finish(action)

    def _superseded(self, newest: int) -> bool:
        if self.controller is None or newest <= self.controller.run.epoch:
            return False
        self.step_down(f"epoch {newest} has begun")
        return True

    def _learn_newest(self, newest: int | None, asked: float) -> None:
        if newest is not None and self.controller is not None and not self._superseded(newest):
            self._guard.pulse_written(asked)
            self.controller.hangs.limits.ordered(self._world.directory.order)

    # -- the run directory -------------------------------------------------------------------------------------

    def _keep(self, limits: KeptLimits) -> None:
        self._world.storage.ask(self._agent, lambda: self._world.directory.keep_limits(limits), lambda _: None)

    def _record_epoch(self) -> None:
        controller = self.controller
        if controller is None:
            return
        record = EpochRecord(controller.run.epoch, self._agent.node, controller.run.term.endpoint, JOB)

        def answer(won: bool | None) -> None:
            if self.controller is not controller:
                return
            if won is None:
                self._world.after(1.0, lambda: self._agent.event(self._record_epoch))
            elif won:
                self._carry_out(controller.epoch_recorded())
            else:
                self.step_down("another controller holds the same epoch")

        self._world.storage.ask(self._agent, lambda: self._world.directory.claim_epoch(record), answer)

    def _claim_witness(self, witness: str) -> None:
        controller = self.controller
        assert controller is not None

        def answer(holder: str | None) -> None:
            if self.controller is controller:
                self._carry_out(controller.witness_claimed(witness, holder))

        directory, node = self._world.directory, self._agent.node
        self._world.storage.ask(self._agent, lambda: directory.claim_witness(witness, node), answer)

    def _ask_past(self) -> None:
        directory = self._world.directory

        def question() -> tuple[int, RunHistory]:
            said = directory.verdict
            verdict = (said["verdict"], said["exit_code"]) if said is not None else None
            return directory.newest, RunHistory(
                tuple(sorted(directory.committed)), directory.last_round, verdict, directory.limits, directory.order
            )

        def answer(reply: tuple[int, RunHistory] | None) -> None:
            if self.controller is None:
                return
            if reply is None:
                self._world.after(1.0, lambda: self._agent.event(self._ask_past))
            elif not self._superseded(reply[0]):
                self._carry_out(self.controller.inform(reply[1]))

        self._world.storage.ask(self._agent, question, answer)

    def _finish(self, finish: Finish) -> None:
        self._verdict = {
            "verdict": finish.verdict, "exit_code": finish.exit_code, "reason": finish.reason, **finish.fields,
        }  # fmt: skip
        self._world.record("verdict", {"node": self._agent.node, "verdict": finish.verdict, "reason": finish.reason})
        self._verdict_due = self._agent.monotonic() + verdict_writer.TIMEOUT_S
        self._write_verdict()

    def _write_verdict(self) -> None:
        self._next_verdict = self._agent.monotonic() + verdict_writer.RETRY_S
        if self._agent.monotonic() > self._verdict_due:
            self._verdict_written()
        else:
            verdict = self._verdict
            assert verdict is not None
            self._world.storage.ask(
                self._agent, lambda: self._world.directory.write_verdict(verdict), self._learn_verdict
            )

    def _learn_verdict(self, newest: int | None) -> None:
        if newest is not None and self._verdict is not None and not self._superseded(newest):
            self._verdict_written()

    def _verdict_written(self) -> None:
        self._verdict = None
        if self.controller is not None:
            self._carry_out(self.controller.verdict_written())
