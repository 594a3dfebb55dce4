"""``resilio check-nodes``: pair the nodes of a job, or nodes that this machine plays, and name bad and slow ones."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.slurm.runs import run_names

_DESCRIPTION = """Pairs the nodes of this job: each multiplies matrices and then talks with its partner, on GPUs where
there are any, and every number is verified. Pairs that fail or are slow are paired again with nodes that passed, and a
node is named only when that confirms it. Without -w inside a job: all of its nodes."""

_EXAMPLES = """examples:
  in a batch script, before the program; the next job can keep away from what was found:
      resilio check-nodes --exclude-file bad-nodes.txt
      sbatch --exclude "$(cat bad-nodes.txt)" job.sh
  only on the nodes that nothing is said against:
      srun --nodelist "$(resilio check-nodes --print good)" ./program
  from a login node, in an allocation of its own (srun reads SLURM_PARTITION, SLURM_ACCOUNT, SBATCH_…):
      resilio check-nodes -w gpu[001-016] --srun=--gpus-per-node=8
  on this machine, which plays four nodes:
      resilio check-nodes --local 4
  in a run: its ranks pause between two steps, the nodes are tested, the ranks go on
      resilio check-nodes --run runs/large
      resilio check-nodes --run runs/large --replace      without the nodes that are named, after the next commit

exit codes: 0 no node is named; 1 a node is named as bad or slow; 2 a mistake in the command; 3 it cannot be told
"""
_PRINTS = ("good", "bad", "slow", "named")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio check-nodes", description=_DESCRIPTION, epilog=_EXAMPLES,
    )  # fmt: skip
    parser.add_argument("--run", metavar=run_names.METAVAR, help="the nodes of a run that trains: its ranks pause")
    parser.add_argument("--replace", action="store_true", help="with --run: go on without nodes that are named")
    parser.add_argument("-w", "--nodelist", metavar="NODES", help="these nodes: n[1-4,7]")
    parser.add_argument("--local", type=int, metavar="N", help="no Slurm: this machine plays N nodes")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds for the whole check (default: 300)")
    parser.add_argument("--slow-ratio", type=float, metavar="R", help="times the median that is slow (default: 1.5)")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="numbers for pair_policy.toml's")
    parser.add_argument("--address", metavar="HOST", help="how the nodes reach this machine (default: its name)")
    parser.add_argument(
        "--srun", action="append", default=[], metavar="OPTION", help="one more option of srun; several times"
    )
    parser.add_argument("--exclude-file", type=Path, metavar="FILE", help="write the named nodes there, as a host list")
    parser.add_argument("--print", choices=_PRINTS, metavar="|".join(_PRINTS), help="print this host list alone")
    parser.add_argument("--json", action="store_true", help="the whole result as JSON")
    parser.add_argument("--quiet", action="store_true", help="say nothing on the way")
    parser.add_argument("--dry-run", action="store_true", help="say what would be started, and start nothing")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 0 fine, 1 found, 2 a mistake, 3 cannot tell."""
    options = _parser().parse_args(argv)
    if options.replace and options.run is None:
        raise UsageError("--replace is for --run RUN: which run is to go on without them?")
    if options.json and options.print:
        raise UsageError("--json and --print both want standard output: choose one")
    if options.run is not None:
        from resilio_hpc.cli.check_nodes import in_run

        return in_run.test(options)
    from resilio_hpc.cli.check_nodes import report
    from resilio_hpc.diagnose import check, starters

    request = _request(options)
    if options.dry_run:
        if request.place != "local":
            import shlex

            print(shlex.join(starters.srun_argv(request, request.nodes)))
        print(f"would pair {len(request.nodes)} nodes, for at most {request.policy.budget_s:g} s")
        return 0
    require("torch", "pairing nodes")
    with report.progress(options.quiet) as progress:
        result = check(request, progress)
    if options.exclude_file is not None:
        report.write_exclude_file(options.exclude_file, result)
    if options.json:
        print(report.as_json(result), flush=True)
    elif options.print:
        print(report.host_list(result, options.print), flush=True)
    else:
        report.show(result, sys.stdout)
    return {"fine": 0, "found": 1}.get(result.outcome, 3)


def _request(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    import msgspec

    from resilio_hpc.diagnose import CheckRequest
    from resilio_hpc.diagnose.policy import pair_policy
    from resilio_hpc.slurm.client.allocation import detect
    from resilio_hpc.slurm.client.hostlist import expand

    given = {"budget_s": options.budget, "slow_compute": options.slow_ratio}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        policy = msgspec.convert({**msgspec.to_builtins(pair_policy(options.policy)), **given}, type(pair_policy()))
    except msgspec.ValidationError as error:
        raise UsageError(f"--budget, --slow-ratio: {error}") from None
    if options.local is not None:
        if options.nodelist:
            raise UsageError("--local and -w exclude each other")
        if not 1 <= options.local <= 256:
            raise UsageError(f"--local {options.local}: this machine can play 1 to 256 nodes")
        return CheckRequest(nodes=tuple(f"local{n}" for n in range(options.local)), place="local", policy=policy)
    allocation = detect(os.environ)
    nodes = tuple(dict.fromkeys(expand(options.nodelist))) if options.nodelist else ()
    host = options.address or socket.gethostname()
    if allocation is None:
        if not nodes:
            raise UsageError("no job to check the nodes of: run it inside one, or give -w NODES or --local N")
        return CheckRequest(nodes=nodes, place="srun", policy=policy, address=host, srun_options=tuple(options.srun))
    outside = [node for node in nodes if node not in allocation.nodes]
    if outside:
        raise UsageError(f"-w: {outside[0]} is not a node of job {allocation.job}")
    if allocation.in_step:
        raise UsageError("this is a task of srun: give the command in the batch script itself (or under salloc)")
    return CheckRequest(
        nodes=nodes or allocation.nodes, place="step", policy=policy, address=options.address or allocation.node,
        job=allocation.job, cpus=min(allocation.cpus_per_node, default=0), srun_options=tuple(options.srun),
    )  # fmt: skip
