"""``resilio health epilog``: remove a job's leftovers on the node."""

from __future__ import annotations

import argparse
import os
import time

import msgspec

from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles
from resilio_hpc.prolog_epilog.hooks import epilog as epilogs
from resilio_hpc.prolog_epilog.hooks import process_cleanup


def epilog(options: argparse.Namespace) -> int:
    """Remove the job's leftovers, and print what was done."""
    job = epilogs.job_of(os.environ)
    files = NodeFiles()
    policy = epilogs.Policy.of(tables.load(options.site).settings["epilog"])
    entries = process_cleanup.see_entries(files, (*policy.clean, *policy.cached), time.time())
    plan = epilogs.decide(job, process_cleanup.see_processes(files), entries, policy)
    if options.dry_run:
        done = epilogs.would_be(job, plan)
    else:
        done = process_cleanup.carry_out(job, plan, policy, files)
    print(msgspec.json.encode(done).decode() if options.json else _epilog_text(done, options.dry_run), flush=True)
    return 0


def _epilog_text(done: epilogs.CleanupDone, dry_run: bool) -> str:
    would = "would be " if dry_run else ""
    parts = [f"{done.killed} processes {would}ended", f"{len(done.removed)} leftovers {would}removed"]
    parts += [f"{len(done.kept)} kept"] if done.kept else []
    parts += [done.why] if done.why else []
    parts += [f"failed: {text}" for text in done.failed[:5]]
    return printable(f"epilog of job {done.job}: {', '.join(parts)}", 500)
