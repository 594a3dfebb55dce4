"""The results of ``make test-all``, which add up part by part in tests/test_all.json."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest

from tests.support.environments import ROOT
from tests.support.scheduling import rooms

FILE = ROOT / "tests" / "test_all.json"


class PartResults:
    """A pytest plugin of the process that sees all reports: keeps a part's results, and tells what all covered."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.time()
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that failed in any phase has failed."""
        worst = self._outcomes.get(report.nodeid, "")
        if report.failed or not worst or (worst == "passed" and report.skipped):
            self._outcomes[report.nodeid] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write this part down beside the others, and tell of all. A part in which nothing ran leaves no trace."""
        if not self._outcomes:
            return
        results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
        results[self._name] = self._result()
        FILE.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        for line in told(results):
            terminalreporter.write_line(line)

    def _result(self) -> dict[str, Any]:
        by_outcome = {
            outcome: [test for test, one in self._outcomes.items() if one == outcome]
            for outcome in ("passed", "failed", "skipped")
        }
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        return {
            "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began),
            "commit": commit.stdout.strip(),
            "passed": len(by_outcome["passed"]),
            "failed": sorted(by_outcome["failed"]),
            "skipped": len(by_outcome["skipped"]),
            "rooms": rooms(self._outcomes),
        }


def told(results: dict[str, Any]) -> list[str]:
    """Return what the parts covered beyond ``make test``, a line each. Pure."""
    lines = ["", "beyond make test:"]
    for name, one in sorted(results.items()):
        where = ", ".join(f"{room} {count}" for room, count in one["rooms"].items())
        lines.append(
            f"  part {name} at {one['commit']} on {one['began']}: {one['passed']} passed, {len(one['failed'])} failed, "
            f"{one['skipped']} skipped in {one['seconds'] / 60:.0f} min ({where})"
        )
        lines += [f"    failed: {test}" for test in one["failed"]]
    sizes = sorted({int(name.partition("/")[2]) for name in results})
    parts = [f"{number}/{size}" for size in sizes for number in range(1, size + 1)]
    missing = [name for name in parts if name not in results]
    return lines + ([f"  not run yet: {', '.join(missing)}"] if missing else [])
