"""``resilio doctor``: what works on this machine for launches and their checkpoints, and why not."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.directories import directory_path
from resilio_hpc.core.errors import UsageError
from resilio_hpc.doctor import examine, registry, report
from resilio_hpc.doctor.finding import DoctorCheck, DoctorView

_DESCRIPTION = """Looks at all that a launch and its checkpoints need of this machine: the installation, memory, limits,
network, directories, Slurm, GPUs; then launches two ranks, of which one kills itself, and times its recovery. Every
look has a time limit. Nothing is changed, and what is written is removed."""

_EXAMPLES = """examples:
  on a login node, or your own machine:
      resilio doctor
  on a compute node, for the run directory of your jobs, and its disk:
      srun --nodes=1 resilio doctor --run-dir /scratch/me/runs --local-checkpoints /local
  some parts alone (their names are those of the report; docs/doctor.md explains them):
      resilio doctor host-name ports slurm-settings
  for a program, without the recovery:
      resilio doctor --json --quick

exit codes: 0 nothing that launches need fails (there may be warnings); 1 something does; 2 a mistake in the command
"""
_NARROWEST, _WIDEST = 40, 110


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="resilio doctor", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="only these, and what they build on")
    parser.add_argument("--run-dir", metavar="DIR", help="the run directory (default: resilio-runs, as of a launch)")
    parser.add_argument("--local-checkpoints", metavar="DIR", help="a disk of this node, as for resilio-launch")
    parser.add_argument("--quick", action="store_true", help="leave the recovery out")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="seconds for it (default: 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 0 works, 1 something that launches need fails, 2 a mistake."""
    options = _parser().parse_args(argv)
    if not 1 <= options.limit <= 3600:
        raise UsageError(f"--limit {options.limit:g}: give 1 to 3600 seconds")
    checks = [_in_time(check, options.limit) for check in registry.select(options.checks, options.quick)]
    view = DoctorView(
        dict(os.environ),
        _directory("--run-dir", "resilio-runs" if options.run_dir is None else options.run_dir),
        _directory("--local-checkpoints", options.local_checkpoints) if options.local_checkpoints is not None else None,
        options.limit,
    )
    results = examine.examine(checks, view)
    verdict = report.sentence(results, len(checks) == len(registry.CHECKS))
    if options.json:
        print(report.as_json(results, verdict, socket.gethostname(), str(view.run_dir)))
    else:
        width = min(max(shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)
        print(report.as_text(results, verdict, width))
    sys.stdout.flush()
    return report.exit_code(results)


def _in_time(check: DoctorCheck, limit_s: float) -> DoctorCheck:
    """Return the check; the recovery has its own limit, and time to end what takes longer."""
    from resilio_hpc.doctor import recovery

    return replace(check, budget_s=limit_s + recovery.MARGIN_S) if check.name == registry.RECOVERY else check


def _directory(option: str, given: str) -> Path:
    try:
        directory_path(given, option)  # as it was given: "" and a URL are refused
        return directory_path(Path(given).expanduser(), option)
    except OSError as error:
        raise UsageError(f"the current directory is gone ({error.strerror}): cd into one that exists") from None
