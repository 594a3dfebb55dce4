"""Fail for each test that takes over 5 s, by tests/durations.json, and is marked neither slow nor slurm."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import durations


def main() -> int:
    """Return the exit code."""
    found = durations.too_slow(durations.read())
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
