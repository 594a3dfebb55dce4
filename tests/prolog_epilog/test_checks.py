"""Every check: it passes on a healthy node, fails on a bad one, doubts nonsense, and names what hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilio_hpc.prolog_epilog.base.check import Check, Result, Thresholds
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.probe import Source
from resilio_hpc.prolog_epilog.base.table import Table, load, overlay
from resilio_hpc.prolog_epilog.checks import registry
from resilio_hpc.prolog_epilog.run.runner import CheckRunner, RunMemory
from tests.support.prolog_epilog.cases import CASES, Case
from tests.support.prolog_epilog.fake_nvml import FakeNvml
from tests.support.prolog_epilog.hung_children import hung_child
from tests.support.prolog_epilog.node_trees import write

TABLE = load(site=Path("/dev/null"))
# Places of the healthy tree. File systems are those of the machine that the test runs on.
SITE: dict[str, dict[str, Any]] = {
    "file-systems": {"paths": ["/nvme"], "write": ["/nvme"]},
    "leftovers": {"burst_buffer": ["/nvme"]},
}
NAMES = sorted(TABLE.checks)


def table_for(case: Case, name: str) -> Table:
    """As shipped, with the places of the tree and the limits of the case."""
    checks = dict(TABLE.checks)
    settings = {key: dict(value._values) for key, value in TABLE.settings.items()}
    merged = {key: {**SITE.get(key, {}), **case.settings.get(key, {})} for key in {*SITE, *case.settings}}
    overlay(checks, settings, {"settings": merged, name: {"limits": case.limits} if case.limits else {}}, "the test")
    return Table(checks, {key: Thresholds(value) for key, value in settings.items()})


def look(
    root: Path, name: str, case: Case, nvml: FakeNvml | None = None, memory: RunMemory | None = None, now_s: float = 1e5
) -> Result:
    """Run one check on the node below ``root``."""
    table = table_for(case, name)
    node = NodeView(settings=table.settings, root=root, nvml=lambda: nvml or FakeNvml())
    check = replace_budget(table.checks[name], 300.0)  # the machine may be slow; budgets are not the subject here
    runner = CheckRunner(registry.SOURCES, registry.PROBES, node, lambda: now_s, memory=memory or RunMemory())
    (result,) = runner.run([check])
    return result


def replace_budget(check: Check, budget_s: float) -> Check:
    return msgspec.structs.replace(check, budget_s=budget_s)


def test_every_check_of_the_tables_has_code_and_cases() -> None:
    assert sorted(registry.PROBES) == sorted(CASES) == NAMES
    assert {check.source for check in TABLE.checks.values()} == set(registry.SOURCES)
    assert len(NAMES) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_a_check_passes_on_a_healthy_node(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    limits = {} if name in HEALTHY_NEEDS_SHIPPED_LIMITS else case.limits
    memory = RunMemory()
    for now_s in (1e5, 1e5 + 400):
        result = look(write(tmp_path), name, replace(case, limits=limits), memory=memory, now_s=now_s)
        assert (result.status, result.faults) == ("pass", ()), result.note


# Cases whose limits make the healthy node fail, since there a real file system is what is looked at.
HEALTHY_NEEDS_SHIPPED_LIMITS = {
    *("disk-inodes", "disk-space", "mount-latency", "gpu-nvlink"),
    *("leftovers-burst-buffer", "leftovers-shm", "leftovers-tmp"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_check_fails_on_a_bad_node_and_says_why(name: str, tmp_path: Path) -> None:
    case, memory = CASES[name], RunMemory()
    if case.twice:
        first = look(write(tmp_path), name, case, memory=memory)
        assert first.status == "pass", first
    result = look(write(tmp_path, case.bad), name, case, case.nvml, memory, 1e5 + 400)
    assert result.status == "fail", (result.status, result.note)
    named = [fault for fault in result.faults if fault.device == case.device]
    assert named, result.faults
    assert any(case.says in fault.evidence for fault in named), named


@pytest.mark.parametrize("name", NAMES)
def test_nonsense_is_doubted_and_never_taken_for_a_fault(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.malformed or case.malformed_nvml
    result = look(write(tmp_path, case.malformed), name, case, case.malformed_nvml)
    assert (result.status, result.faults) == ("unknown", ()), result.faults
    assert result.note
    assert "itself failed" not in result.note, result.note


def hanging(fetch: Callable[[NodeView], object]) -> Source:
    """A source whose first file does not answer."""

    def hangs(node: NodeView) -> object:
        node.mark("/scratch/data")
        time.sleep(3600)
        return fetch(node)

    return Source(hangs)


@pytest.mark.parametrize("name", NAMES)
def test_a_check_that_hangs_is_ended_and_its_culprit_is_named(name: str, tmp_path: Path) -> None:
    check = replace_budget(TABLE.checks[name], 0.2)
    sources = {check.source: hanging(registry.SOURCES[check.source].fetch)}
    node = NodeView(settings=TABLE.settings, root=write(tmp_path))
    (result,) = CheckRunner(sources, registry.PROBES, node, lambda: 1e5, child=hung_child).run([check])
    (fault,) = result.faults
    assert (result.status, fault.on_fail) == ("timeout", check.on_timeout)
    assert "/scratch/data on /scratch (10.0.0.1:/scratch, nfs4): no answer in 0.2 s" in fault.evidence
