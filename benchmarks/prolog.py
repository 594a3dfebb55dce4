"""What our prolog adds to a job's start on a node, beside a prolog that is empty and one that starts Python.

    python benchmarks/prolog.py [--repeats 50] [--json FILE]

Each is run as slurmd runs it: a new process, without PATH, waited for. All take turns, so that what else the machine
does meets all alike. ``warm verdict`` is the case of every job; ``no verdict`` is right after a boot.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import Series, print_table, write_json
from resilio_hpc.prolog_epilog.base.check import NodeVerdict, Result
from resilio_hpc.prolog_epilog.base.node import boot_id, uptime_s
from resilio_hpc.prolog_epilog.base.table import load
from resilio_hpc.prolog_epilog.hooks.hook_files import HookSettings, render_hooks
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache

ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "n1"}


def warm(directory: Path) -> None:
    """Write a verdict on a healthy node, of now."""
    checks = load().checks.values()
    results = tuple(
        Result(check=one.id, status="pass", on_fail=one.on_fail, severity=one.severity, uptime_s=uptime_s())
        for one in checks
    )
    VerdictCache(directory).write(
        NodeVerdict(node="n1", boot=boot_id(), uptime_s=uptime_s(), unix_s=time.time(), results=results)
    )


def script(folder: Path, name: str, text: str) -> list[str]:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return [str(path)]


def prolog(folder: Path, name: str, directory: Path) -> list[str]:
    return script(folder, name, render_hooks(HookSettings(directory=directory))["prolog"])


def timed(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, check=False)
    took = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"{argv[0]}: exit code {done.returncode}: {done.stderr.decode()}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="resilio-bench-") as memory:
        directory, folder = Path(memory) / "health", Path(memory)
        warm(directory)
        commands = {
            "empty prolog": script(folder, "empty", "#!/bin/sh\nexit 0\n"),
            "ours, warm verdict": prolog(folder, "warm", directory),
            "ours, no verdict": prolog(folder, "cold", Path(memory) / "none"),
            "one that starts Python": script(folder, "python", f"#!/bin/sh\nexec {sys.executable} -S -c ''\n"),
        }
        series = [Series(name, "as slurmd runs it") for name in commands]
        for turn in range(options.repeats + 1):
            for one, argv in zip(series, commands.values(), strict=True):
                took = timed(argv)
                if turn > 0:  # the first brings files into the page cache
                    one.values_s.append(took)
    title = f"a prolog, {options.repeats} times"
    print_table(title, series)
    more = (series[1].median_s() - series[0].median_s()) * 1000
    print(f"our prolog with a warm verdict takes {more:.1f} ms more than an empty one (median)")
    for one in series:
        print(f"  {one.name}: {one.percentile_s(5) * 1e3:.1f} to {one.percentile_s(95) * 1e3:.1f} ms (5 to 95 %)")
    if options.json:
        write_json(options.json, title, series)


if __name__ == "__main__":
    main()
