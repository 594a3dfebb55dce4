"""``resilio drill run --campaign``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import is_installed
from resilio_hpc.devtools.demo.stage import why_no_slurm
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES
from resilio_hpc.drills import campaign_faults
from resilio_hpc.drills.campaign import PoissonCampaign, campaign_cluster
from resilio_hpc.drills.campaign_file import CampaignFile, summary
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.campaign_result import StruckFault, as_fields
from resilio_hpc.drills.drill_words import slug
from resilio_hpc.drills.evidence import keep_evidence, new_folder, write_record


def main(options: argparse.Namespace) -> int:
    """Do what is left of a campaign. Exit code 0 where all is right, 1 where not, 130 when interrupted."""
    plan = plan_of(options)
    if why := why_no_slurm():
        raise UsageError(f"no dev cluster can be made here ({why}), and a campaign needs one")
    file = CampaignFile(options.results, plan)
    code = 0
    if file.left_s > 0.0:
        code = _part(options, plan, file)
    parts = file.parts()
    if not parts:
        return code
    found = summary(parts)
    if options.json:
        print(json.dumps({"v": 1, **found}, indent=1), file=terminal.raw(sys.stdout), flush=True)
    else:
        show(found)
    return code or (1 if found["wrong"] else 0)


def plan_of(options: argparse.Namespace) -> CampaignPlan:
    """Return the plan that the options describe. Raises UsageError."""
    if options.mtbf <= 0.0 or options.duration <= 0.0:
        raise UsageError("--mtbf and --duration are more than 0")
    weights = _weights(options.faults) if options.faults else None
    fuse = weights is not None and any(
        fault.needs_fuse and weights.get(fault.name, 0.0) > 0.0 for fault in campaign_faults.FAULTS
    )
    campaign_faults.chosen(weights, fuse)
    return CampaignPlan(
        mtbf_s=options.mtbf, duration_s=options.duration, seed=options.seed, weights=weights, nodes=int(options.nodes),
        twin=not options.no_twin, torch=not options.no_torch and is_installed("torch"), fuse=fuse,
        slurm=options.slurm or HOST_SERIES,
    )  # fmt: skip


def _weights(text: str) -> dict[str, float]:
    known = {slug(name): name for name in campaign_faults.NAMES}
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, weight = word.partition("=")
        try:
            found[known.get(slug(name), name)] = float(weight or 1.0)
        except ValueError:
            raise UsageError(f"--faults {word!r}: NAME=WEIGHT is needed") from None
    return found


def _part(options: argparse.Namespace, plan: CampaignPlan, file: CampaignFile) -> int:
    began = time.monotonic()
    left = dataclasses.replace(plan, duration_s=file.left_s)

    def say(text: str) -> None:
        if not options.json:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def struck(fault: StruckFault) -> None:
        file.struck(fault)
        whom = f" on {fault.node}" if fault.node else ""
        say(f"{fault.name}{f', rank {fault.rank}' if fault.rank is not None else ''}{whom}")

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    file.begin()
    with campaign_cluster(left, f"campaign-{os.getpid()}") as cluster:
        say(f"Slurm {cluster.slurm_version}, {len(cluster.nodes)} nodes; {left.duration_s:.0f} s of faults are left")
        result = PoissonCampaign(cluster, left, part=file.part, on_fault=struck, say=say).run()
        file.ended(result)
        folder = new_folder(options.evidence.absolute(), "campaign")
        keep_evidence(cluster, folder)
        write_record(folder, {"plan": dataclasses.asdict(left), **as_fields(result)})
        say(f"{f'WRONG: {result.wrong}; ' if result.wrong else ''}evidence {folder}")
    say(f"ended after {time.monotonic() - began:.0f} s")
    return 130 if result.interrupted else 0


def show(found: Mapping[str, Any]) -> None:
    """Print what all parts came to."""
    console = terminal.console(highlight=False)
    table = Table("fault", "struck", "recovery, median", "worst", "steps done again, worst", pad_edge=False, box=None)
    for name, one in found["by_fault"].items():
        table.add_row(
            name, str(one["faults"]), _s(one["recovery_median_s"]), _s(one["recovery_max_s"]),
            "" if one["repeated_steps_max"] is None else str(one["repeated_steps_max"]),
        )  # fmt: skip
    console.print(table)
    twin = f", the twin's {found['twin_goodput']:.2%}" if found["twin_goodput"] is not None else ""
    ledger = f" ({found['ledger_goodput']:.2%} by resilio report)" if found["ledger_goodput"] is not None else ""
    lines = [
        f"{found['faults']} faults in {found['seconds']:.0f} s, {found['steps']} steps that count, "
        f"{found['repeated_steps']} done again",
        f"goodput {found['goodput']:.2%} by the ranks' stamps{ledger}{twin}",
    ]
    if found["relative"] is not None:
        lines.append(f"counted steps a second, beside the twin's: {found['relative']:.2%}")
    if found["lost_per_fault_s"] is not None:
        lines.append(f"lost for each fault, beyond steps done again: {found['lost_per_fault_s']:.2f} s")
    if found["compared"]:
        lines.append(f"after each of {found['compared']} steps the bits were compared with the twin's")
    lines += [f"WRONG: {text}" for text in found["wrong"]] or ["every end state is exactly right"]
    print("\n".join(lines), flush=True)


def _s(seconds: float | None) -> str:
    return f"{seconds:.2f} s" if seconds is not None else ""
