"""A rank, or its device, is killed: seconds until all ranks have done a step, and whether they end as without a fault.

    python benchmarks/device_recovery.py --nodes 2 --ranks 8 --repeats 3

Each rank holds a state on a device that is a process of its own and cannot be dumped; it is rebuilt by the log of its
commands. All is on this machine: the nodes are agents of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SCRIPT = Path(__file__).with_name("device_training.py")
LIMIT_S = 280.0


@dataclass(frozen=True)
class DeviceRun:
    """What the ranks of one run said."""

    lines: list[list[str]]

    def said(self, word: str) -> list[list[str]]:
        return [line[1:] for line in self.lines if line[0] == word]

    @property
    def ends(self) -> dict[int, tuple[str, ...]]:
        return {int(line[0]): tuple(line[1:]) for line in self.said("END")}

    @property
    def recovery_s(self) -> float:
        """Return the seconds from the fault until the last rank has done a step."""
        return max(float(line[1]) for line in self.said("AGAIN")) - float(self.said("STRUCK")[0][0])


def device_run(folder: Path, nodes: int, ranks: int, what: str, steps: int = 12, struck: int = 7) -> DeviceRun:
    """Run it once. Raises RuntimeError where it does not end well."""
    folder.mkdir(parents=True)
    argv = [
        *(sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--no-environment-check"),
        *("--nproc-per-node", str(ranks), "--restart-policy", "in-process", str(SCRIPT)),
        *(str(steps), str(struck), what),
    ]  # fmt: skip
    own = {"RESILIO_LOCAL_NODES": str(nodes), "OMP_NUM_THREADS": "1"}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIO_", "SLURM_"))}
    done = subprocess.run(argv, cwd=folder, env={**others, **own}, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    lines = [line.rpartition("] ")[2].split("|") for line in done.stdout.splitlines()]
    return DeviceRun(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calm = device_run(Path(folder) / "calm", options.nodes, options.ranks, "nothing")
        times: dict[str, list[float]] = {"rank": [], "device": []}
        for number in range(options.repeats):
            for what, found in times.items():
                run = device_run(Path(folder) / f"{what}{number}", options.nodes, options.ranks, what)
                found.append(run.recovery_s)
                restored = {line[0]: line[1:4] for line in run.said("RESTORED")}
                took = f"{what}: {run.recovery_s:.2f} s, bit-equal: {run.ends == calm.ends}"
                print(f"{took}, rank 1 restored: {restored.get('1', 'nothing: all began again')}", flush=True)
        for what, found in times.items():
            place = f"{what} killed, {options.nodes}x{options.ranks}"
            print(f"{place}: median {median(found):.2f} s, at most {max(found):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
