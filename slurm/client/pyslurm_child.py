"""pyslurm, in a process of its own: ``python -m resilio_hpc.slurm.client.pyslurm_child``.

libslurm ends its process when it finds no configuration, and waits for minutes when slurmctld is away: neither must
happen to the one who asks. A line on the input is a list of names in JSON (none: all nodes), a line on the output an
answer in the form of ``scontrol show nodes --json``, so that the same parser reads it. The first line says READY.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

READY = "pyslurm"


def main() -> int:
    """Answer questions until the input ends."""
    pyslurm = importlib.import_module("pyslurm")
    _say({READY: str(getattr(pyslurm, "__version__", ""))})
    for line in sys.stdin:
        try:
            _say({"nodes": [record(node) for node in _load(pyslurm, json.loads(line))], "errors": []})
        except pyslurm.RPCError as error:
            _say({"errors": [{"description": str(error)}]})
    return 0


def _load(pyslurm: Any, names: Sequence[str]) -> list[Any]:
    return [pyslurm.Node.load(name) for name in names] if names else list(pyslurm.Nodes.load().values())


def record(node: Any) -> dict[str, object]:
    """Return a node as scontrol's JSON has it. pyslurm does not tell which resources are in use."""
    return {
        "name": node.name,
        "state": [node.state],
        "partitions": list(node.partitions or ()),
        "cpus": node.total_cpus,
        "alloc_cpus": node.allocated_cpus,
        "real_memory": node.real_memory,
        "alloc_memory": node.allocated_memory,
        "gres": ",".join(f"{kind}:{count}" for kind, count in (node.configured_gres or {}).items()),
        "features": list(node.available_features or ()),
        "active_features": list(node.active_features or ()),
        "weight": node.weight,
        "reason": node.reason,
        "reason_set_by_user": node.reason_user,
        "reason_changed_at": node.reason_time,
        "comment": node.comment,
        "extra": node.extra,
        "address": node.address,
        "version": node.slurm_version,
    }


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
