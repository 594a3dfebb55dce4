"""``status.json``, the controller's view of a run, read without trust. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.core.json_fields import Fields, printable

MAX_NODES = 100_000
MOST_SLOW = 4


@dataclass(frozen=True)
class NodeStatus:
    """A node of the run. ``role``: training, spare, joining or lost. ``step_s``: seconds per step.

    ``memory``: what is nearly full; "" where all is as usual.
    """

    node: str
    role: str
    first_rank: int | None = None
    ranks: int = 0
    silent_s: float | None = None
    step: int | None = None
    step_s: float | None = None
    held_steps: tuple[int, ...] = ()
    memory: str = ""

    @property
    def rank_words(self) -> str:
        """Return ``0–3``, ``7``; "" without ranks."""
        if self.first_rank is None or self.ranks < 1:
            return ""
        last = self.first_rank + self.ranks - 1
        return str(last) if self.ranks == 1 else f"{self.first_rank}–{last}"


@dataclass(frozen=True)
class Status:
    """The controller's status at ``time`` (Unix seconds). ``committed``: the newest durable step, None without one.

    ``stalled_s``: for how long there has been no step, where that is too long.
    """

    time: float
    epoch: int
    controller: str
    phase: str
    round: int
    restarts: int
    without_progress: int
    committed: int | None
    nodes: tuple[NodeStatus, ...]
    stalled_s: float | None = None
    slow: tuple[Fields, ...] = ()  # events of slow ranks that are not over

    @property
    def world_size(self) -> int:
        """Return the ranks in the round."""
        return sum(node.ranks for node in self.nodes)

    @property
    def step(self) -> int | None:
        """Return the furthest step of any node."""
        return max((node.step for node in self.nodes if node.step is not None), default=None)

    @property
    def steps_per_s(self) -> float | None:
        """Return the slowest node's step rate, which is the run's."""
        slowest = max((node.step_s or 0.0 for node in self.nodes), default=0.0)
        return 1.0 / slowest if slowest > 0 else None


def parse_status(data: object) -> Status | None:
    """Return the status in a JSON object; None without a time. Missing and wrong fields count as unknown."""
    f = Fields.of(data)
    at = f.time("time")
    if at is None:
        return None
    committed = f.whole("committed")
    return Status(
        time=at,
        epoch=_count(f, "epoch"),
        controller=f.text("controller", "?"),
        phase=f.text("phase", "unknown"),
        round=_count(f, "round"),
        restarts=_count(f, "restarts"),
        without_progress=_count(f, "without_progress"),
        committed=committed if committed is not None and committed >= 0 else None,
        nodes=_nodes(f),
        stalled_s=f.number("stalled_s"),
        slow=tuple(f.each("slow")[:MOST_SLOW]),
    )


def _nodes(f: Fields) -> tuple[NodeStatus, ...]:
    agents, lost = f.inner("agents"), f.texts("lost")
    found: dict[str, NodeStatus] = {}
    for member in f.each("members")[:MAX_NODES]:
        name = member.text("node")
        role = "lost" if name in lost else "training" if agents.has(name) else "joining"
        found[name] = _node(name, role, agents.inner(name), member)
    for name in [*list(agents.data)[:MAX_NODES], *lost[:MAX_NODES]]:
        if name not in found:
            found[name] = _node(name, "lost" if name in lost else "spare", agents.inner(name), Fields({}))
    return tuple(found.values())


def _node(name: str, role: str, agent: Fields, member: Fields) -> NodeStatus:
    step, step_s = agent.whole("step"), agent.number("step_s")
    held = agent.data.get("held")
    return NodeStatus(
        node=name,
        role=role,
        first_rank=member.whole("first_rank"),
        ranks=min(max(_count(member, "local_world_size"), 0), MAX_NODES),
        silent_s=agent.number("silent_s"),
        step=step if step is not None and step >= 0 else None,
        step_s=step_s if step_s is not None and step_s > 0 else None,
        held_steps=tuple(one for one in held if isinstance(one, int))[:100] if isinstance(held, list) else (),
        memory=printable(agent.text("memory"), 200),
    )


def _count(f: Fields, name: str) -> int:
    return f.whole(name) or 0
