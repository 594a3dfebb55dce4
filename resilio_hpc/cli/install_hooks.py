"""``resilio install-hooks``: Slurm's prolog, epilog, task prolog and health check for a site."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base import table
from resilio_hpc.prolog_epilog.hooks import hook_files
from resilio_hpc.prolog_epilog.run.cached_verdict import DIRECTORY

EXAMPLES = f"""examples:
  resilio install-hooks --print                  the files and the lines of slurm.conf, nothing is written
  resilio install-hooks                          write the files to {hook_files.INSTALLED}
  resilio install-hooks --mode observe           prologs say what they would do, and pass
  resilio install-hooks --missing fail           no job without a fresh verdict

Install on each node's own disk, with an interpreter that is there, too: what lies on a shared one hangs with it.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 2 after a mistake of the user."""
    options = _parser().parse_args(argv)
    settings = _settings(options)
    conf = hook_files.render_conf(settings)
    files = hook_files.render_hooks(settings)
    if not options.print:
        hook_files.install(settings)
    if options.json:
        said = {"where": str(settings.where), "slurm_conf": conf, "written": not options.print}
        print(json.dumps({**said, "files": files if options.print else list(files)}, indent=1))
        return 0
    for name, text in files.items() if options.print else ():
        print(f"==> {settings.where}/{name} <==\n{text}")
    print(
        "# slurm.conf"
        if options.print
        else f"Written to {settings.where}. For slurm.conf, then scontrol reconfigure:\n"
    )
    print("\n".join([*conf, *hook_files.recommended()]))
    unit = settings.where / hook_files.UNIT
    if not options.print:
        print(f"\nThe node daemon (else the health check does its work): systemctl enable --now {unit}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio install-hooks",
        description="Write Slurm's prolog, epilog, task prolog and health check, and say what slurm.conf needs.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--print", action="store_true", help="only print all of it")
    parser.add_argument(
        "--to", type=Path, default=hook_files.INSTALLED, metavar="DIR", help=f"({hook_files.INSTALLED})"
    )
    parser.add_argument("--mode", choices=("observe", "enforce"), default="enforce", help="(enforce)")
    parser.add_argument(
        "--missing", choices=("pass", "fail"), default="pass", help="what a prolog does without a fresh verdict (pass)"
    )
    parser.add_argument("--ttl", type=int, default=900, metavar="S", help="how long a verdict is fresh (900)")
    parser.add_argument("--interval", type=int, default=60, metavar="S", help="HealthCheckInterval (60)")
    parser.add_argument("--verdicts", type=Path, default=DIRECTORY, metavar="DIR", help=f"in memory ({DIRECTORY})")
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="on the nodes (this one)")
    parser.add_argument(
        "--site", type=Path, metavar="FILE", help="changes to checks (/etc/resilio/health.toml if there)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _settings(options: argparse.Namespace) -> hook_files.HookSettings:
    if not 30 <= options.ttl <= 86_400 or not 10 <= options.interval <= 3600:
        raise UsageError(f"--ttl {options.ttl}, --interval {options.interval}: give 30 to 86400 and 10 to 3600 seconds")
    for name, path in (("--to", options.to), ("--verdicts", options.verdicts), ("--python", Path(options.python))):
        if not path.is_absolute() or any(one.isspace() for one in str(path)):
            raise UsageError(f"{name} {path}: give an absolute path without spaces, since slurm.conf cannot quote")
    if options.site is not None:
        table.load(options.site)  # mistakes in it are reported now, not on every node
    return hook_files.HookSettings(
        where=options.to,
        directory=options.verdicts,
        mode=options.mode,
        missing=options.missing,
        ttl_s=options.ttl,
        interval_s=options.interval,
        python=options.python,
        package=hook_files.package_folder(),
        site=str(options.site.absolute()) if options.site else "",
        path=hook_files.search_path(),
    )
