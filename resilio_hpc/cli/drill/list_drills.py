"""``resilio drill list``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Column, Table

from resilio_hpc.core import terminal
from resilio_hpc.drills.campaign_faults import FAULTS
from resilio_hpc.drills.drill_words import DEV_CLUSTER, LIVE_RUN, DrillWords, listed

WIDTH, LEAST = 100, 150  # of a file; of a table


def main(options: argparse.Namespace) -> int:
    """Print the table. Exit code 0."""
    where = {None: "", "dev": DEV_CLUSTER, "live": LIVE_RUN}[options.where]
    drills = [one for one in listed() if not where or where in one.where]
    if not options.srun and not options.json:
        drills = [one for one in drills if not one.title.startswith("srun: ")]
    if options.json:
        in_campaign = [{"name": fault.name, "weight": fault.weight} for fault in FAULTS]
        found = {"v": 1, "drills": [asdict(one) for one in drills], "campaign_faults": in_campaign}
        print(json.dumps(found, indent=1), file=terminal.raw(sys.stdout), flush=True)
        return 0
    width = terminal.columns(WIDTH)
    if width < LEAST:
        print("\n".join(line for one in drills for line in _narrow(one, width)), flush=True)
    else:
        terminal.console(highlight=False, width=width).print(_table(drills))
    print("A dev cluster needs root and Slurm on this machine (docs/devcluster.md).", flush=True)
    return 0


def _table(drills: Sequence[DrillWords]) -> Table:
    made = Table(Column("drill", max_width=46, overflow="fold"), "what is done", "what should happen", "where", "needs",
                 pad_edge=False, box=None)  # fmt: skip
    for one in drills:
        made.add_row(one.name, one.does, one.should, ", ".join(one.where), ", ".join(one.needs))
    return made


def _narrow(one: DrillWords, width: int) -> list[str]:
    where = ", ".join([*one.where, *one.needs])
    text = f"{one.does} -> {one.should} ({where})"
    return [one.name, *textwrap.wrap(text, max(40, width), initial_indent="  ", subsequent_indent="  ")]
