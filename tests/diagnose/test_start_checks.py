"""A node whose health checks find a fault cannot work, and says which; checks that hang or fail tell nothing."""

from __future__ import annotations

import sys

import pytest

from resilio_hpc.diagnose import start_checks
from resilio_hpc.diagnose.checker import StartChecks
from resilio_hpc.prolog_epilog.base.check import Fault, NodeVerdict, Result
from tests.support.waiting import until


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("print('ib-link: mlx5_0 is down')", "ib-link: mlx5_0 is down"),
        ("print()", ""),
        ("print('half'); raise SystemExit(1)", ""),
        ("import time; time.sleep(600)", ""),
    ],
)
def test_what_the_checks_say_is_taken(program: str, found: str) -> None:
    checks = StartChecks(python(program), limit_s=1.0 if "600" in program else 60.0)

    def over() -> bool:
        checks.look()
        return checks.over

    until(over, "the end of the checks")
    assert checks.found == found
    checks.end()


def test_only_what_drains_a_node_makes_it_unfit() -> None:
    results = tuple(
        Result(check=check, status="fail", on_fail=action, severity="error", faults=(Fault(evidence),))  # type: ignore[arg-type]
        for check, action, evidence in (("ib-link", "drain", "mlx5_0 is down"), ("net-link", "warn", "eth1 is slow"))
    )
    verdict = NodeVerdict(node="n1", boot="b", uptime_s=1.0, unix_s=1.0, results=results)
    assert start_checks.of_verdict(verdict) == "ib-link: mlx5_0 is down"
