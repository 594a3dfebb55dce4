"""What ``ControllerHost`` does for a controller, on virtual sockets and a virtual run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilio_hpc.launch import messages as m
from resilio_hpc.launch.controller import Controller
from resilio_hpc.launch.controller_state import Action, AskPast, Clock, Finish, Past, Record, Send
from virtual_cluster.network import Connection

if TYPE_CHECKING:
    from virtual_cluster.agent import VirtualAgent
    from virtual_cluster.world import World


class VirtualHost:
    """The listening end of an agent."""

    def __init__(self, world: World, agent: VirtualAgent) -> None:
        self.controller: Controller | None = None
        self._world = world
        self._agent = agent
        self._callers: dict[str, Connection] = {}  # by node: where an answer goes
        self._verdict: dict[str, Any] | None = None
        self._next_verdict = 0.0
        self._next_pulse = 0.0

    def begin(self, epoch: int) -> None:
        """Become controller."""
        clock = Clock(self._agent.monotonic, self._agent.unix)
        self._callers.clear()
        self.controller = Controller(self._world.config, epoch, self._agent.node, clock)
        self._verdict = None
        self._ask_past()

    def heard(self, message: m.ToController, connection: Connection) -> None:
        """A message has arrived at our socket."""
        if self.controller is None or self._superseded(getattr(message, "epoch", 0)):
            return
        self._callers[message.node] = connection
        self._carry_out(self.controller.handle(message))

    def tick(self) -> None:
        """Let time pass."""
        if self.controller is not None:
            self._carry_out(self.controller.tick())
        if self._verdict is not None and self._world.now >= self._next_verdict:
            self._next_verdict = self._world.now + 1.0
            self._world.storage.ask(self._agent, self._store_verdict, self._verdict_stored)
        if self.controller is not None and self._world.now >= self._next_pulse:
            self._next_pulse = self._world.now + 0.5
            self._world.storage.ask(self._agent, self._store_pulse, self._learn_newest)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action.node, action.message)
            elif isinstance(action, Record):
                self._world.record(action.kind, action.fields)
            elif isinstance(action, AskPast):
                self._ask_past()
            else:
                self._finish(action)

    def _send(self, node: str, message: m.ToAgent) -> None:
        connection = self._callers.get(node)
        if connection is not None:
            self._world.network.to_caller(connection, lambda: connection.caller.hears(message))

    def _superseded(self, newest: int) -> bool:
        if self.controller is None or newest <= self.controller.epoch:
            return False
        self._world.record("stepped_down", {"node": self._agent.node, "newer": newest})
        self.controller = None
        self._agent.core.connection_lost()
        return True

    def _learn_newest(self, newest: int | None) -> None:
        if newest is not None:
            self._superseded(newest)

    # -- the run directory -------------------------------------------------------------------------------------

    def _ask_past(self) -> None:
        directory = self._world.directory
        epoch = self.controller.epoch if self.controller else 0

        def question() -> tuple[int, Past]:
            directory.fence = max(directory.fence, epoch)  # before the steps are read
            said = directory.verdict
            verdict = (said["verdict"], said["exit_code"]) if said is not None else None
            return directory.newest, Past(tuple(sorted(directory.committed)), directory.last_round, verdict)

        def answer(reply: tuple[int, Past] | None) -> None:
            if reply is None:
                self._world.after(1.0, self._ask_past)
            elif self.controller is not None and not self._superseded(reply[0]):
                self._carry_out(self.controller.inform(reply[1]))

        self._world.storage.ask(self._agent, question, answer)

    def _finish(self, finish: Finish) -> None:
        self._verdict = {
            "verdict": finish.verdict, "exit_code": finish.exit_code, "reason": finish.reason, **finish.fields,
        }  # fmt: skip

    def _store_pulse(self) -> int:
        directory = self._world.directory
        if self.controller is not None and directory.newest <= self.controller.epoch and self.controller.leads():
            directory.pulse = (self.controller.epoch, directory.pulse[1] + 1)
        return directory.newest

    def _store_verdict(self) -> int:
        newest = self._world.directory.newest
        if self._verdict is not None and newest <= self._verdict["epoch"]:
            self._world.directory.verdict = self._verdict
        return newest

    def _verdict_stored(self, newest: int | None) -> None:
        if newest is None or self._verdict is None or self._superseded(newest):
            return
        self._verdict = None
        if self.controller is not None:
            self._carry_out(self.controller.verdict_written())
