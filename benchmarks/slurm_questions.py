"""How long a question to Slurm takes: its commands beside pyslurm, on a dev cluster of the newest series.

.venv/bin/python benchmarks/slurm_questions.py [--jobs 300] [--nodes 200]

Needs root and scripts/pyslurm_setup.sh. Most of the nodes exist in slurm.conf alone, and all jobs but a few wait.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.process import Completed, run
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.demo.stage import binds
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import NEWEST_SERIES
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.pyslurm_client import PyslurmClient
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmReader

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-pyslurm" / "bin" / "python"
REPEATS = 15


def main() -> None:
    """Print a table: median milliseconds of each question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=200, help="250 at most")
    options = parser.parse_args()
    known = f"NodeName=x[1-{options.nodes}] NodeAddr=127.1.0.[1-{options.nodes}] CPUs=64 RealMemory=256000 State=DOWN"
    conf = [known] if options.nodes else []
    name = f"questions-{time.time_ns() % 1_000_000}"
    with devcluster.start(name, slurm=NEWEST_SERIES, nodes=3, binds=binds(), conf=conf, timeout_s=120) as cluster:
        submit = f"for i in $(seq {options.jobs}); do sbatch -Q --hold --nodes=1 --wrap 'sleep 1'; done"
        cluster.run("ctl", ["bash", "-c", submit], 600)
        measure(cluster, options.nodes + 3, options.jobs)


def measure(cluster: DevCluster, nodes: int, jobs: int) -> None:
    """Ask both clients the same, in turn."""
    asked_from = cluster.machines.command("ctl", [])
    variables = [f"{key}={value}" for key, value in cluster.machines.environment().items()]

    def inside(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        more = [f"{key}={value}" for key, value in extra.items()]
        return run(["env", "-i", *variables, *more, *asked_from, *argv], timeout_s)

    child = ["env", f"PYTHONPATH={ROOT}", str(PYTHON), "-m", "resilio_hpc.slurm.client.pyslurm_child"]
    began = time.perf_counter()
    pyslurm = PyslurmClient(PyslurmReader(["env", "-i", *variables, *asked_from, *child]), inside)
    started = time.perf_counter()
    if not pyslurm.agrees():
        raise SystemExit("pyslurm and the commands do not tell the same")
    agreed = time.perf_counter()
    commands = CommandClient(inside)
    commands.series()
    print(f"Slurm {NEWEST_SERIES}, {nodes} nodes, {jobs} jobs; median of {REPEATS}, ms")
    print(f"start of pyslurm's process {(started - began) * 1e3:.0f}, comparison {(agreed - started) * 1e3:.0f}")
    print(f"{'':16}{'commands':>10}{'pyslurm':>10}")
    for what, ask in QUESTIONS.items():
        times = [(timed(ask, commands), timed(ask, pyslurm)) for _ in range(REPEATS)]
        by_commands, by_pyslurm = (statistics.median(one) * 1e3 for one in zip(*times, strict=True))
        print(f"{what:16}{by_commands:10.1f}{by_pyslurm:10.1f}")
    nothing = statistics.median(timed(lambda _: inside(["true"], 9.0, {}), commands) for _ in range(REPEATS))
    print(f"{'a command alone':16}{nothing * 1e3:10.1f}")


QUESTIONS: dict[str, Callable[[CommandClient], object]] = {
    "all nodes": lambda client: client.nodes(),
    "one node": lambda client: client.nodes(["n1"]),
    "all jobs": lambda client: client.jobs(),
    "one job": lambda client: client.jobs(["2"]),
    "partitions": lambda client: client.partitions(),
}


def timed(ask: Callable[[CommandClient], object], client: CommandClient) -> float:
    """Return the seconds that a question takes."""
    began = time.perf_counter()
    ask(client)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
