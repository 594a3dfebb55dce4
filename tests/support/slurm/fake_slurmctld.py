"""A model of slurmctld for tests, not a Slurm: it knows the few commands that draining uses, and raises on all others.

What it does with them is what 22.05.8, 24.11.5 and 26.05.5 were seen to do: an order to drain replaces any reason; a
reason alone is kept only on nodes that are drained or DOWN; UNDRAIN of a node that is not drained is no error; every
order to a node is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client.hostlist import expand


@dataclass
class FakeNode:
    """A node as slurmctld has it."""

    base: str = "IDLE"
    drain: bool = False
    reason: str = ""
    reason_time: int = 0
    partitions: tuple[str, ...] = ("main",)
    weight: int = 1


def nothing(argv: Sequence[str]) -> None:
    """Nobody comes between."""


@dataclass
class FakeSlurmctld:
    """A Runner. ``between`` is called with each command before it is carried out: what others do meanwhile."""

    nodes: dict[str, FakeNode]
    now: int = 1_800_000_000
    updates: int = 0
    between: Callable[[Sequence[str]], None] = nothing
    orders: list[list[str]] = field(default_factory=list)
    away: bool = False

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        words = list(argv)
        self.between(words)
        if words == ["sinfo", "-V"]:
            return Completed(tuple(words), 0, "slurm 26.05.5\n", "")
        if self.away:
            raise CommandError(words, 1, stderr="Unable to contact slurm controller (connect failure)")
        if words == ["sdiag"]:
            count = f"\tREQUEST_UPDATE_NODE  ( 3002) count:{self.updates} ave_time:1 total_time:1\n"
            text = "Remote Procedure Call statistics by message type\n" + (count if self.updates else "")
            return Completed(tuple(words), 0, text, "")
        if words[:4] == ["scontrol", "-a", "show", "nodes"] and words[-1] == "--json":
            return Completed(tuple(words), 0, self._show(words[4:-1]), "")
        if words[:2] == ["scontrol", "update"]:
            self.orders.append(words)
            self.update(words[2:])
            return Completed(tuple(words), 0, "", "")
        raise AssertionError(f"the model of slurmctld does not know {words}")

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Nothing happens meanwhile."""

    def _show(self, names: list[str]) -> str:
        unknown = [name for name in names if name not in self.nodes]
        if unknown:
            raise CommandError(["scontrol"], 1, stderr=f"Node {unknown[0]} not found")
        return json.dumps({"nodes": [self._record(name) for name in names or self.nodes], "errors": []})

    def _record(self, name: str) -> dict[str, object]:
        node = self.nodes[name]
        return {
            "name": name,
            "state": [node.base, *(["DRAIN"] if node.drain else [])],
            "partitions": list(node.partitions),
            "weight": node.weight,
            "reason": node.reason,
            "reason_changed_at": {"set": True, "infinite": False, "number": node.reason_time},
            "reason_set_by_user": "root" if node.reason else "",
        }

    def update(self, words: Sequence[str]) -> None:
        """``NodeName=n1 State=DRAIN Reason=…``, of anybody."""
        fields = dict(word.split("=", 1) for word in words)
        names = expand(fields.pop("NodeName"))
        state, reason, weight = fields.pop("State", ""), fields.pop("Reason", ""), fields.pop("Weight", "")
        assert not fields, f"the model of slurmctld does not know {fields}"
        assert state in ("", "DRAIN", "UNDRAIN", "DOWN", "RESUME"), state
        assert reason or state not in ("DRAIN", "DOWN"), "scontrol refuses this without a reason"
        self.updates += 1
        for name in names:
            self.nodes[name].weight = int(weight) if weight else self.nodes[name].weight
            self._update_one(self.nodes[name], state, reason)

    def _update_one(self, node: FakeNode, state: str, reason: str) -> None:
        if state == "DRAIN":
            node.drain = True
        elif state == "DOWN":
            node.base = "DOWN"
        elif state == "UNDRAIN":
            node.drain = False
        elif state == "RESUME":
            if not node.drain and node.base != "DOWN":
                raise CommandError(["scontrol"], 1, stderr="slurm_update error: Invalid node state specified")
            node.base, node.drain = "IDLE", False
        if reason:
            node.reason, node.reason_time = reason, self.now
        if not node.drain and node.base != "DOWN":
            node.reason, node.reason_time = "", 0
