"""The health checks that run before ranks start, on this node, for a checker that may end them at any time (NVX-4).

It runs as the job's user, in a process of its own, since a look at a mount may hang. Checks of GPUs are left out: a job
may have some of them only, and the agent looks at those itself.
"""

from __future__ import annotations

import os
import sys

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.check import NodeVerdict
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.table import Table
from resilio_hpc.prolog_epilog.run.health_run import HealthRun, node_name, of_context
from resilio_hpc.prolog_epilog.run.runner import RunMemory

OF_DEVICES = ("gpus", "nvswitch")
SECONDS = 10.0  # in which they must have ended: without an answer they tell nothing


def trouble(table: Table, node: NodeView, name: str) -> str:
    """Return what makes the node unfit for ranks, "" for nothing."""
    checks = [check for check in of_context(table, "start") if check.source not in OF_DEVICES]
    run = HealthRun(table, node, name)
    return of_verdict(run.verdict(run.run(checks, RunMemory())))


def of_verdict(verdict: NodeVerdict) -> str:
    """Return the findings for which a node is drained. Pure."""
    found = [f"{one.check}: {one.evidence}" for one in verdict.findings if one.action in ("drain", "fail")]
    return printable("; ".join(found), 500)


def main() -> None:
    """Print what was found, in one line."""
    try:
        table = tables.load()
        print(trouble(table, NodeView(settings=table.settings), node_name(os.environ)), flush=True)
    except ResilioError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
