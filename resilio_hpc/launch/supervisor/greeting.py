"""What the launcher says at its start: which run it is, where it keeps everything, and what would end it."""

from __future__ import annotations

import os

from resilio_hpc.launch.allocation import placements as p
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain.chaining import Chain
from resilio_hpc.launch.process.announce import say
from resilio_hpc.launch.rundir.run_directory import RunIdentity


def greet(site: Site, run: RunIdentity, chain: Chain) -> None:
    """Say which run begins, and in which link of its chain."""
    where = "on this machine" if site.mode is SiteMode.LOCAL else f"in job {site.job}"
    link = f", link {chain.number}" if chain.number > 1 or chain.active else ""
    say(f"run {run.run_id} {where}{link}; everything is kept in {run.path}")
    if site.mode is SiteMode.STEP:
        _warn_of_the_step(chain.active)


def _warn_of_the_step(chained: bool) -> None:
    command = p.our_srun(os.environ)
    missing = p.missing_survival_flags(command) if command else []
    if missing:
        say(f"warning: this srun lacks {' '.join(missing)}: the loss of one node or task will end them all")
    after = "the next job carries on then" if chained else "with --chain a next job would carry on"
    say(
        f"note: the death of this srun ends all agents; {after}; plain resilio-launch in the batch script survives that"
    )
