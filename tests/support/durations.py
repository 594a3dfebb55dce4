"""How long each test takes, in tests/durations.json: whole runs write it, the order of tests and the lint read it.

Where more workers run than there are processors, a test's time is cut to its share of one. A busy or slower machine
stretches tests: those that compute more than those that wait. So a kind's times are divided by the median of their
ratios to the recorded ones, and a recorded time changes only where the new one differs by half and by ``CHANGE_S``. It
grows only where the test took longer than nine in ten others did for their recorded times.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.scheduling import ALONE

FILE = ROOT / "tests" / "durations.json"
LEAST_S = 0.3
CHANGE_S = 0.5
QUICK_AT_MOST_S = 5.0
"""What a test may take that is marked neither ``slow`` nor ``slurm``."""

Recorded = dict[str, dict[str, float]]
"""Kind ("quick", "slurm" or "slow") → test → seconds."""


def read(path: Path = FILE) -> Recorded:
    """Return what is recorded; {} where nothing is."""
    try:
        found: Recorded = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def seconds(recorded: Recorded) -> dict[str, float]:
    """Return test → seconds, whatever its kind."""
    return {test: value for tests in recorded.values() for test, value in tests.items()}


def kind_of(test: str, keywords: Mapping[str, object]) -> str:
    """Return the kind of a test. Its keywords are its marks, and also the names of its folders, such as ``slurm``."""
    return "slow" if "slow" in keywords else "slurm" if test.startswith(ALONE) else "quick"


def too_slow(recorded: Recorded) -> list[str]:
    """Return a line for each test that takes too long for its marks."""
    found = sorted(recorded.get("quick", {}).items())
    return [f"{test}: {took:g} s, without mark" for test, took in found if took > QUICK_AT_MOST_S]


def merge(recorded: Recorded, measured: Recorded, whole: bool) -> Recorded:
    """Return ``recorded`` with the times of a run. Of a ``whole`` run, what it did not have is left out. Pure."""
    before, now = seconds(recorded), seconds(measured)
    merged: Recorded = {}
    for kind in sorted(recorded.keys() | measured.keys()):
        stretched, most = _stretched(before, measured.get(kind, {}))
        stays = {} if whole and kind in measured else recorded.get(kind, {})
        merged[kind] = {test: took for test, took in stays.items() if test not in now}
        for test, took in measured.get(kind, {}).items():
            if took / stretched >= LEAST_S or test in before:
                merged[kind][test] = _kept(before.get(test), took / stretched, took / most)
    return merged


def _stretched(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[float, float]:
    """By how much this run stretched the tests that are recorded: the median, and what nine in ten stay below."""
    ratios = sorted(now[test] / before[test] for test in before.keys() & now.keys() if before[test] >= LEAST_S)
    if not ratios:
        return 1.0, 1.0
    return max(1.0, statistics.median(ratios)), max(1.0, ratios[len(ratios) * 9 // 10])


def _kept(before: float | None, took: float, at_least: float) -> float:
    if before is None or before < LEAST_S:
        return round(took, 1)
    took = min(took, max(before, at_least))
    alike = abs(took - before) < CHANGE_S or 1 / 1.5 < took / before < 1.5
    return before if alike else round(took, 1)


class Recorder:
    """A pytest plugin of the process that sees all reports: sums up each test's phases, and writes them at the end."""

    def __init__(self, workers: int, whole: bool) -> None:
        self._share = min(1.0, (os.cpu_count() or 1) / max(1, workers))
        self._whole = whole  # all tests of a kind run, if any of it does
        self._measured: Recorded = defaultdict(lambda: defaultdict(float))
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase."""
        self._measured[kind_of(report.nodeid, report.keywords)][report.nodeid] += report.duration * self._share
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Replace the file. A failed test says nothing of its time, and an interrupted run nothing of what is gone."""
        recorded = read()
        known = seconds(recorded)
        measured = {
            kind: {test: known.get(test, 0.0) if test in self._failed else took for test, took in tests.items()}
            for kind, tests in self._measured.items()
        }
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        text = json.dumps(merge(recorded, measured, self._whole and ended), indent=0, sort_keys=True) + "\n"
        part = FILE.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(FILE)
