"""A loaded machine on purpose: busy processes, a writer that syncs, and memory that comes and goes.

python benchmarks/machine_load.py --seconds 60      # on its own, to see what something else makes of it
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.launch.process.process_tree import die_with_parent

BUSY_PER_CORE = 2
CHURN_BYTES = 256 << 20
WRITE_BYTES = 8 << 20


def burn() -> None:
    """Never gives up its core."""
    value = 1
    while True:
        value = value * 1103515245 % 2147483647


def churn() -> None:
    """Take fresh pages, touch all of them, give them back."""
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        block = bytearray(CHURN_BYTES)
        block[::page] = b"x" * len(block[::page])
        del block


def write(directory: Path) -> None:
    """Write a file and wait until it is on the disk, again and again."""
    block = os.urandom(WRITE_BYTES)
    with tempfile.TemporaryFile(dir=directory) as file:
        while True:
            file.seek(0)
            file.write(block)
            file.flush()
            os.fsync(file.fileno())


KINDS = {"burn": lambda _: burn(), "churn": lambda _: churn(), "write": write}


@contextmanager
def loaded(directory: Path, busy: int = BUSY_PER_CORE * (os.cpu_count() or 1)) -> Iterator[int]:
    """Load this machine with ``busy`` processes that compute, one that takes memory, and one that writes.

    ``directory`` is on the disk that is written to. Gives the number of processes.
    """
    kinds = ["burn"] * busy + ["churn", "write"]
    command = [sys.executable, __file__, "--directory", str(directory), "--parent", str(os.getpid()), "--be"]
    processes = [subprocess.Popen([*command, kind], stdin=subprocess.DEVNULL) for kind in kinds]
    try:
        yield len(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, metavar="S", help="how long (60)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--be", choices=KINDS, help=argparse.SUPPRESS)  # what a child of ours is
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_options(sys.argv[1:])
    if options.be:
        die_with_parent(options.parent)
        KINDS[options.be](options.directory)
    with loaded(options.directory) as processes:
        print(f"{processes} processes for {options.seconds:g} s")
        time.sleep(options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
