"""The agent's decisions: whom to follow, when to speak, what to do with the controller's words. Pure.

What becomes of the ranks is in ``node_ranks``. Everything that touches the world goes through ``Ports``, which the
real agent implements with sockets and processes and a simulator with virtual ones.
"""

from __future__ import annotations

from resilio_hpc.launch import messages as m
from resilio_hpc.launch.agent_ports import Ports
from resilio_hpc.launch.node_ranks import NodeRanks
from resilio_hpc.launch.succession import Claim, EpochRecord, Follow, Succession


class AgentCore(NodeRanks):
    """One node's agent. ``hello`` is completed with what changes each time that it is sent."""

    def __init__(self, hello: m.Hello, succession: Succession, ports: Ports, heartbeat_timeout_s: float) -> None:
        super().__init__(hello.node, hello.last, ports, heartbeat_timeout_s)
        self.slots = hello.local_world_size
        self.warnings: list[str] = []
        self._hello = hello
        self._succession = succession
        self._beat_interval = min(1.0, heartbeat_timeout_s / 8)
        self._next_beat = 0.0
        self._welcomed = False

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Heartbeats, lease, succession."""
        now = self._ports.monotonic()
        if self._succession.tick(now) is not None:
            self._ports.scan_epochs()
        if now >= self._next_beat and self._succession.following is not None and self.ending is None:
            self._next_beat = now + self._beat_interval
            if self._welcomed and self._succession.in_contact:
                self._beat(now)
            else:
                self._say_hello(now)
        if self._ranks_alive and now > self._lease and self.ending is None and not self._stopping:
            self._end_lease()

    @property
    def next_wakeup_s(self) -> float:
        """How long the caller may sleep."""
        return 0.05 if not self._succession.in_contact else min(0.1, self._beat_interval)

    def _beat(self, now: float) -> None:
        number = self.local.number if self.local else -1
        step = self.local.step if self.local else -1
        step_time = self.local.step_time if self.local else 0.0
        self._ports.to_controller(
            m.Heartbeat(self.node, self._hello.incarnation, self.epoch, now, number, step, step_time)
        )

    def _say_hello(self, now: float) -> None:
        hello = {field: getattr(self._hello, field) for field in self._hello.__struct_fields__}
        hello |= {
            "committed": tuple(sorted(self.committed)), "last": self.state, "prepared": self._highest_round,
            "silent_s": self._succession.silent_s(now),
        }  # fmt: skip
        self._ports.to_controller(m.Hello(**hello))

    # -- succession --------------------------------------------------------------------------------------------

    def connection_lost(self) -> None:
        """The transport lost the controller: what was on its way may be lost, so we present ourselves again."""
        self._succession.connection_lost(self._ports.monotonic())
        self._welcomed = False
        self._next_beat = self._ports.monotonic()

    def scanned(self, record: EpochRecord | None, pulse: int | None = None) -> None:
        """Newest epoch record, or None when there is none, and its controller's pulse."""
        self._follow_or_claim(self._succession.scanned(record, pulse, self._ports.monotonic()))

    def claimed(self, epoch: int, won: bool, record: EpochRecord | None) -> None:
        """Whether our claim of ``epoch`` was the first."""
        self._follow_or_claim(self._succession.claimed(epoch, won, record, self._ports.monotonic()))

    def storage_failed(self) -> None:
        """The run directory did not answer."""
        self._succession.storage_failed(self._ports.monotonic())

    def _follow_or_claim(self, step: Claim | Follow | None) -> None:
        if self.ending is not None:
            return
        if isinstance(step, Claim):
            self._ports.claim_epoch(step.epoch)
        elif isinstance(step, Follow):
            if step.record.node == self.node:  # our claim won, even if its answer was lost
                self._ports.record("controller", epoch=step.record.epoch, node=self.node)
                self._ports.become_controller(step.record.epoch)
            self._welcomed = False
            self._begin_epoch(step.record.epoch)
            self._next_beat = self._ports.monotonic()
            self._ports.follow(step.record)

    # -- the controller's words --------------------------------------------------------------------------------

    def controller_said(self, message: m.ToAgent) -> None:
        """Take a message of the controller that we follow; others' are refused."""
        if self.ending is not None or (message.epoch != self.epoch and not isinstance(message, m.End)):
            return
        if message.epoch < self.epoch:
            return
        now = self._ports.monotonic()
        peers = [node for node, _ in message.peers] if isinstance(message, m.Beat | m.Welcome) else []
        self._succession.heard(message.epoch, peers, now)
        if isinstance(message, m.Beat):
            self._lease = max(self._lease, message.sent + self._lease_s)
        elif isinstance(message, m.Welcome):
            self._welcome()
        elif isinstance(message, m.Prepare):
            self._prepare(message)
        elif isinstance(message, m.Start):
            self._start(message)
        elif isinstance(message, m.End):
            self._end(message)
        else:
            self._during_round(message)

    def _welcome(self) -> None:
        self._welcomed = True
        for signal in self.warnings:
            self._ports.to_controller(m.Warned(self.node, self.epoch, signal))
        for fact in self._facts.values():
            self._ports.to_controller(fact)

    def warned(self, signal: str) -> None:
        """A signal reached this agent. Kept, so that the next controller hears of it too."""
        if signal not in self.warnings:
            self.warnings.append(signal)
        if self._welcomed:
            self._ports.to_controller(m.Warned(self.node, self.epoch, signal))
