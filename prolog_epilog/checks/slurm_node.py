"""Slurm's side of the node: whether slurmd works with the controller's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resilio_hpc.prolog_epilog.base.check import Absent, Fault, Thresholds, Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.processes import Process
from resilio_hpc.prolog_epilog.base.processes import fetch as fetch_processes
from resilio_hpc.slurm.client.commands import config


def fetch(node: NodeView) -> Mapping[str, str]:
    """Return ``scontrol show config``, bounded. Raises Unreadable where Slurm does not answer: no fault of the node."""
    captured = node.files.optional("/.scontrol-show-config")
    if captured is not None:
        return parse_config(captured)
    node.mark("scontrol show config")
    found = config()
    if not found:
        raise Unreadable("Slurm does not answer")
    return found


def parse_config(text: str) -> Mapping[str, str]:
    """Parse Slurm's configuration. Raises Unreadable. Pure."""
    found = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in text.splitlines())}
    if "ClusterName" not in found:
        raise Unreadable(f"scontrol show config: {text[:60]!r}")
    return found


def drift(found: Mapping[str, str], limits: Thresholds) -> Iterable[Fault]:
    """Yield a fault where HASH_VAL says that this node's slurm.conf differs (scontrol(1), DebugFlags=NO_CONF_HASH)."""
    said = found.get("HASH_VAL", "")
    if said.startswith("Different"):
        yield Fault(f"this node's slurm.conf is not the controller's: {said}")


def fetch_switches(node: NodeView) -> list[Process]:
    """Return the processes, on a node with NVSwitches. Raises Absent."""
    if not node.files.names("/dev", r"nvidia-nvswitch\d+"):
        raise Absent("no NVSwitch")
    return fetch_processes(node)
