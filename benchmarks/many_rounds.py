"""What a thousand recoveries leave behind: memory, descriptors, threads of a rank that lives on, and of the launcher.

.venv/bin/python benchmarks/many_rounds.py                        # 1,000 rounds of two ranks, one killed in each
.venv/bin/python benchmarks/many_rounds.py --rounds 100 --spare   # with a standby process for each
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launched import Launched, launched, marked
from launchers import OURS, Launcher
from measure import shown

SCRIPT = Path(__file__).resolve().parent / "many_rounds_training.py"
LIMIT_S, STILL_S = 3600, 60.0
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True)
class Footprint:
    """What a process holds, or several of one name together."""

    processes: int
    resident_mb: float
    descriptors: int
    threads: int


def footprint(pids: list[int]) -> Footprint:
    resident, descriptors, threads, living = 0.0, 0, 0, 0
    for pid in pids:
        try:
            resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
        except OSError:
            continue  # it has ended
        living += 1
    return Footprint(living, resident, descriptors, threads)


def rounds_done(run: Launched) -> tuple[int, int]:
    """Return the last round that rank 0 entered, and its process."""
    path = run.directory / "rounds"
    lines = path.read_text().splitlines() if path.exists() else []
    number, pid = map(int, lines[-1].split()) if lines else (-1, 0)
    return number, pid


def looks(run: Launched, at: list[int]) -> Iterator[tuple[int, dict[str, Footprint]]]:
    """Yield the round and what each part holds, when so many rounds are done."""
    first, changed, before = 0, time.monotonic(), -1
    for wanted in at:
        while (found := rounds_done(run))[0] < wanted:
            if found[0] != before:
                before, changed = found[0], time.monotonic()
            if run.process.poll() is not None or time.monotonic() - changed > STILL_S:
                raise RuntimeError(f"it stands still in round {found[0]}:\n{run.last_output()}")
            time.sleep(0.1)
        first = first or found[1]
        if found[1] != first:
            raise RuntimeError(f"rank 0 is another process in round {found[0]}: {first} before, {found[1]} now")
        pids = marked(str(run.directory))
        yield (
            found[0],
            {
                "rank 0": footprint([first]),
                "all processes": footprint(pids),
            },
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--spare", action="store_true", help="with --spare-ranks 1")
    options = parser.parse_args()
    flags = ("--spare-ranks=1",) if options.spare else ()
    launcher = Launcher("resilio-launch", "in-process", OURS / "resilio-launch", flags)
    at = sorted({10, options.rounds // 10, options.rounds // 2, options.rounds} - {0})
    table = Table("round", "of", "processes", "resident MB", "descriptors", "threads")
    began = time.monotonic()
    with launched(launcher, 2, SCRIPT, ()) as run:
        for number, parts in looks(run, at):
            for name, part in parts.items():
                cells = (part.processes, f"{part.resident_mb:.0f}", part.descriptors, part.threads)
                table.add_row(str(number), name, *map(str, cells))
    Console(highlight=False).print(table, f"{shown(time.monotonic() - began)} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
