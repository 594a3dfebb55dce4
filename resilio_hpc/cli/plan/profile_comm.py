"""``resilio plan profile-comm``: latency and bandwidth of collectives, measured in a job or on this machine."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resilio_hpc.autoparallel.measure import profile_file
from resilio_hpc.autoparallel.measure.comm_backends import BACKENDS
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.submit import sbatch_options, submission
from resilio_hpc.slurm.submit.template import normalised

_HELP = """collectives: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send and receive; inside of a
node, and over all nodes. Each is fitted by latency and bus bandwidth (as nccl-tests counts it), through medians of
repeats. What FILE says of operators (resilio plan profile) stays.

examples:
  resilio plan profile-comm --backend nccl --nodes 2 --ranks-per-node 8 --set gpus_per_node=8 --out cluster.h5
  resilio plan profile-comm --backend mpi --nodes 4 --ranks-per-node 1 --set partition=cpu --out cluster.h5
  resilio plan profile-comm --backend gloo --here 4 --out this-machine.h5      (no Slurm: 4 processes on this machine)
  resilio plan predict --rows layouts.csv --profile cluster.h5 --out predicted.csv

exit codes:
  0  FILE was written (--no-wait: the job is in the queue; --dry-run: printed)
  1  Slurm refused or did not answer, or the benchmark failed
  2  a mistake in the command line
"""
MODULE = "resilio_hpc.autoparallel.measure.comm_bench"
LARGEST = {"nccl": 256 << 20, "gloo": 16 << 20, "mpi": 64 << 20}
HERE_S = 540.0
POLL_S = 1.0
_OURS = ("nodes", "ntasks_per_node", "output", "array")


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see the help."""
    options = _parser().parse_args(argv)
    if options.backend not in BACKENDS:
        near = difflib.get_close_matches(options.backend, BACKENDS, 1, 0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        named = printable(repr(options.backend), 60)
        raise UsageError(f"--backend {named} is not known: {hint}known are {', '.join(BACKENDS)}")
    out = options.out.absolute()
    if not out.parent.is_dir():
        raise UsageError(f"--out {options.out}: there is no directory {out.parent}")
    if out.exists():
        profile_file.read(out)  # an error is reported now rather than when all is measured
    if not options.dry_run:
        package = "mpi4py" if options.backend == "mpi" else "torch"
        require(package, f"--backend {options.backend}")
    largest = options.largest << 20 if options.largest else LARGEST[options.backend]
    words = [sys.executable, "-m", MODULE, f"--backend={options.backend}", f"--out={out}", f"--largest={largest}"]
    words.append(f"--curve-s={options.seconds:g}")
    if options.here is not None and options.here < 2:
        raise UsageError(f"--here {options.here}: at least two processes are needed")
    code = _in_a_job(words, out, options) if options.here is None else _here(words, options)
    if options.json and code == 0 and not (options.dry_run or options.no_wait):
        print(json.dumps(as_json(profile_file.read(out)), indent=1))
    return code


def as_json(profile: Profile) -> dict[str, Any]:
    """Return seconds, bytes, and bytes per second of bus bandwidth. Pure."""
    names = ("collective", "span", "ranks", "ranks_per_node", "latency_s", "bandwidth", "error", "sizes", "medians_s")
    curves = [{name: getattr(curve, name) for name in names} for curve in profile.curves]
    return {"about": dict(profile.about_communication or {}), "curves": curves}


def _here(words: Sequence[str], options: argparse.Namespace) -> int:
    """Run so many processes on this machine; the first that fails ends them all."""
    if options.dry_run:
        told = {"processes": options.here, "command": words}
        print(json.dumps(told, indent=1) if options.json else shlex.join(words))
        return 0
    out = sys.stderr if options.json else None
    if options.backend == "mpi":
        mpiexec = shutil.which("mpiexec")
        if mpiexec is None:
            raise UsageError("--backend mpi --here needs mpiexec on PATH")
        started = [subprocess.Popen([mpiexec, "-n", str(options.here), *words], stdout=out)]
    else:
        ranks = local_ranks(options.here, free_port(), os.environ)
        started = [subprocess.Popen(words, env=one, stdout=out) for one in ranks]
    try:
        return _watched(started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def local_ranks(count: int, port: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each process: torchrun's variables. Pure."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        {"GLOO_SOCKET_IFNAME": "lo", **environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(count)
    ]


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watched(started: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline = time.monotonic() + HERE_S
    while any(process.poll() is None for process in started):
        failed = [process.returncode for process in started if process.returncode]
        if failed:
            return 2 if failed[0] == 2 else 1
        if time.monotonic() > deadline:
            raise UsageError(f"not done within {HERE_S:.0f} s: --largest MIB makes it smaller")
        time.sleep(0.05)
    return 1 if any(process.returncode for process in started) else 0


def job_script(words: Sequence[str], ranks_per_node: int, mpi: str) -> str:
    """Return the job's script: one task per rank; all end when one fails. Pure."""
    flags = ["--kill-on-bad-exit=1", f"--ntasks-per-node={ranks_per_node}", *([f"--mpi={mpi}"] if mpi else [])]
    return (
        "#!/bin/bash\n#SBATCH --job-name=profile-comm\n#SBATCH --time=15\n"
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}\nexec srun {shlex.join(flags)} {shlex.join(words)}\n"
    )


def _in_a_job(words: Sequence[str], out: Path, options: argparse.Namespace) -> int:
    for name in ("nodes", "ranks_per_node"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    if options.nodes * options.ranks_per_node < 2:
        raise UsageError("one rank alone has no peer: --nodes 2 or --ranks-per-node 2 at least")
    log = f"{out}.%j.log"
    arguments = [f"--nodes={options.nodes}", f"--ntasks-per-node={options.ranks_per_node}", f"--output={log}"]
    arguments += sbatch_arguments(options.set)
    script = job_script(words, options.ranks_per_node, options.mpi)
    if options.dry_run:
        plain = f"# sbatch {shlex.join(arguments)}\n{script}"
        print(json.dumps({"sbatch": arguments, "script": script}, indent=1) if options.json else plain.rstrip())
        return 0
    before = out.stat().st_mtime_ns if out.exists() else 0
    job = submission.submit(script, arguments, submission.own_environment(os.environ)).job
    print(f"job {job} is in the queue; its output: {log.replace('%j', job)}", file=sys.stderr, flush=True)
    if options.no_wait:
        return 0
    state = wait_for_end(job)
    log_file = Path(log.replace("%j", job))
    said = log_file.read_text(errors="replace") if log_file.exists() else ""
    print(said, end="", file=sys.stderr if options.json else sys.stdout)
    if not out.exists() or out.stat().st_mtime_ns == before:
        raise SlurmError(f"job {job} ended ({state}) without a profile: see {log_file}")
    log_file.unlink(missing_ok=True)
    return 0


def sbatch_arguments(words: Sequence[str]) -> list[str]:
    """Return ``KEY=VALUE`` as words of sbatch's command line. Raises UsageError."""
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        option = sbatch_options.BY_KEY.get(normalised(key))
        if not equals or option is None or option.key in _OURS:
            raise UsageError(f"--set {word}: it is no KEY=VALUE of sbatch (partition=gpu, gpus_per_node=8, time=10 …)")
        found.append(sbatch_options.argument(option, option.check(value)))
    return [word for word in found if word]


def wait_for_end(job: str) -> str:
    """Return the state in which the job ended; UNKNOWN when Slurm has forgotten it. Its time limit bounds the run."""
    while True:
        state = commands.job_state(job)
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "UNKNOWN"):
            return state
        if state == "UNKNOWN" and commands.holding(job) == commands.Holding("", (), "UNKNOWN"):
            return state
        time.sleep(POLL_S)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio plan profile-comm",
        description="Measure collectives, in a short Slurm job or on this machine, for resilio plan predict --profile.",
        epilog=_HELP,
    )
    parser.add_argument("--backend", required=True, metavar="NAME", help=f"one of {', '.join(BACKENDS)}")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE.h5", help="the profile, where all nodes see it"
    )
    parser.add_argument("--here", type=int, metavar="N", help="N processes on this machine, without Slurm")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="of the job (default: 2)")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="one per GPU (default: 1)")
    parser.add_argument(
        "--largest", type=int, default=0, metavar="MIB", help="largest tensor (nccl 256, mpi 64, gloo 16)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each curve, about (default: 10)")
    parser.add_argument("--mpi", default="", metavar="TYPE", help="srun's --mpi for the back end mpi: pmix, pmi2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of sbatch: partition=gpu")
    parser.add_argument("--json", action="store_true", help="print the curves as JSON; what happens, on standard error")
    parser.add_argument("--no-wait", action="store_true", help="return when the job is in the queue")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, write nothing")
    return parser
