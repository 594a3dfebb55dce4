"""What a supervisor tells an agent at its start: one JSON argument, no secrets in it."""

from __future__ import annotations

import msgspec

from resilio_hpc.launch.controller_state import ControllerConfig
from resilio_hpc.launch.options import LaunchOptions
from resilio_hpc.launch.rendezvous import Shape


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``expected``: the allocation's nodes in order; ``supervisor_pid`` > 0: die with that local process."""

    options: LaunchOptions
    node: str
    job: str
    expected: tuple[str, ...]
    address: str
    chained: bool = False
    end_time: float | None = None
    supervisor_pid: int = 0

    def to_json(self) -> str:
        """One line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        """Raises msgspec.MsgspecError for anything that ``to_json`` did not write."""
        return msgspec.json.decode(text, type=cls)

    def controller_config(self) -> ControllerConfig:
        """What decisions need."""
        options = self.options
        return ControllerConfig(
            shape=Shape(options.min_nodes, options.max_nodes, options.node_unit),
            expected=self.expected,
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            join_timeout_s=options.join_timeout_s,
            start_timeout_s=options.start_timeout_s,
            max_without_progress=options.max_restarts,
            chained=self.chained,
            stop_grace_s=options.stop_grace_s,
            end_time=self.end_time,
        )
