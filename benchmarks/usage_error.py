"""How long a user waits to be told of a mistake, and how many lines it takes: resilio-launch beside torchrun.

    python benchmarks/usage_error.py [--quick] [--json FILE]

The same wrong command is given to both; the time is that of the whole process, from start to exit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from measure import machine

OURS = ("-m", "resilio_hpc.cli.resilio_launch")
TORCHRUN = ("-m", "torch.distributed.run")
LIMIT_S = 0.2
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Mistake:
    what: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """Median seconds of the process, lines that it printed, its exit code; -1: still running after the time limit."""

    seconds: float
    lines: int
    exit_code: int


MISTAKES = (
    Mistake("script does not exist", ("--nproc-per-node", "2", "tran.py")),
    Mistake("unknown flag", ("--nproc-pernode", "2", "train.py")),
    Mistake("wrong number of ranks", ("--nproc-per-node", "two", "train.py")),
    Mistake("syntax error in the script", ("--nproc-per-node", "2", "unfinished.py")),
    Mistake("module does not exist", ("--nproc-per-node", "2", "-m", "nowhere.train")),
    Mistake("no script", ("--nproc-per-node", "2")),
)


def answer(command: tuple[str, ...], argv: tuple[str, ...], folder: Path, times: int) -> Answer:
    """Give the wrong command ``times`` times."""
    seconds, lines, code = [], 0, 0
    for _ in range(times):
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *command, *argv],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            code, lines = done.returncode, len((done.stdout + done.stderr).splitlines())
        except subprocess.TimeoutExpired:
            code = -1
        seconds.append(time.perf_counter() - start)
    return Answer(statistics.median(seconds), lines, code)


def measure(quick: bool) -> dict[str, dict[str, Answer]]:
    """Mistake → launcher → answer; the first call of each launcher warms the file cache and is not counted."""
    results: dict[str, dict[str, Answer]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text("print('trained')\n")
        (folder / "unfinished.py").write_text("import torch\nprint(1\n")
        for command in (OURS, TORCHRUN):
            answer(command, ("--help",), folder, 1)
        for mistake in MISTAKES[:3] if quick else MISTAKES:
            results[mistake.what] = {
                "resilio-launch": answer(OURS, mistake.argv, folder, 3 if quick else 11),
                "torchrun": answer(TORCHRUN, mistake.argv, folder, 1 if quick else 3),
            }
    return results


def show(results: dict[str, dict[str, Answer]]) -> None:
    table = Table(title="A usage error, from start to exit")
    for column in ("mistake", "resilio-launch s", "lines", "torchrun s", "lines", "times faster"):
        table.add_column(column, justify="left" if column == "mistake" else "right")
    for what, answers in results.items():
        ours, theirs = answers["resilio-launch"], answers["torchrun"]
        table.add_row(
            what,
            f"{ours.seconds:.3f}",
            str(ours.lines),
            f"{theirs.seconds:.2f}",
            str(theirs.lines),
            f"{theirs.seconds / ours.seconds:.0f}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three mistakes, few repetitions")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    results = measure(arguments.quick)
    show(results)
    if arguments.json:
        plain = {what: {name: asdict(one) for name, one in answers.items()} for what, answers in results.items()}
        arguments.json.write_text(
            json.dumps({"machine": machine(), "limit_s": LIMIT_S, "results": plain}, indent=2) + "\n"
        )
    slow = [what for what, answers in results.items() if answers["resilio-launch"].seconds > LIMIT_S]
    for what in slow:
        print(f"above the limit of {LIMIT_S} s: {what}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
