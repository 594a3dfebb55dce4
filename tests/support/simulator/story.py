"""What happened in a run, as lines in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.agent import VirtualAgent

if TYPE_CHECKING:
    from tests.support.simulator.world import SeededWorld

QUIET = (m.Heartbeat, m.Beat, m.StageReached, m.NoLeader, m.Candidate)


class Story:
    """Listens in. The ledger is told as it is; of messages those that change something."""

    def __init__(self, world: SeededWorld) -> None:
        self._world = world
        self._began = world.now
        world.listener = self._message

    def _message(self, agent: VirtualAgent, said: bool, message: object) -> None:
        if not isinstance(message, QUIET):
            self._world.record("says" if said else "heard", {"node": agent.node, "message": message})

    def lines(self, violation: str) -> Iterator[str]:
        """The story, and how it ended."""
        yield str(self._world.schedule)
        for at, kind, fields in self._world.ledger:
            yield f"{at - self._began:8.3f}  {_line(kind, fields)}"
        verdict = self._world.directory.verdict
        yield f"{self._world.now - self._began:8.3f}  verdict: {verdict['verdict'] if verdict else 'none'}"
        if violation:
            yield f"          VIOLATED: {violation}"


def _line(kind: str, fields: dict[str, Any]) -> str:
    if kind in ("fault", "fault_over"):
        return f"*** {kind.replace('_', ' ')}: {', '.join(str(value) for value in fields.values())}"
    if kind == "crashed":
        return str(fields["traceback"])
    if "message" in fields and len(fields) == 2:
        return f"{fields['node']:>6} {kind} {_short(fields['message'])}"
    rest = "  ".join(f"{name}={value}" for name, value in fields.items() if name != "node")
    return f"{fields.get('node', ''):>6} # {kind}  {rest}"


def _short(message: Any) -> str:
    values = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, m.RoundState):
            value = f"state(epoch {value.epoch}, round {value.round}, {[member.node for member in value.members]})"
        elif name == "failure":
            value = f"{value.kind} {value.message}"
        elif name == "record":
            value = "…"
        elif name in ("records", "peers", "held"):
            value = f"{len(value)}"
        values.append(f"{name}={value}")
    return f"{type(message).__name__}({', '.join(values)})"
