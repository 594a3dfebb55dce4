"""Xids: each does what the table says; bursts are one event; 13 and 31 by unit; many of one GPU are worse than each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.prolog_epilog.check import Fault, Former, Limits
from resilio_hpc.prolog_epilog.kernel_log import KernelLog, Line, parse
from resilio_hpc.prolog_epilog.xid import address, judge, policy

LIMITS = Limits({"burst_s": 180, "escalate": 5, "escalate_window_s": 86400, "same_unit": 3})
NOW = 200_000.0
SM = "pid={}, name=python, Graphics SM Warp Exception on (GPC 3, TPC {}, SM 1): Illegal Instruction"
MMU = "pid={}, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_{} faulted @ 0x7fb3"


def judged(
    *events: tuple[float, int, str], gpu: str = "0000:1b:00", former: Former | None = None
) -> tuple[list[Fault], object]:
    lines = tuple(Line(at, f"NVRM: Xid (PCI:{gpu}): {number}, {text}", True) for at, number, text in events)
    faults, kept = judge(KernelLog(lines), LIMITS, former or Former(None, NOW))
    return list(faults), kept


def actions(*events: tuple[float, int, str]) -> list[str | None]:
    return [fault.on_fail for fault in judged(*events)[0]]


@pytest.mark.parametrize(
    ("xid", "action"),
    [(43, None), (63, None), (13, "warn"), (45, "warn"), (78, "warn"), (48, "evict"), (74, "evict"), (95, "evict"),
     (119, "evict"), (54, "drain"), (79, "drain"), (151, "drain"), (142, "drain"), (9999, "warn")],
)  # fmt: skip
def test_one_xid_asks_for_what_the_table_says(xid: int, action: str | None) -> None:
    assert actions((NOW - 10, xid, "pid=1, name=python, text")) == ([action] if action else [])


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("0x1 (GPU Reset Required)", ["evict"]),
        ("0x2 (Node Reboot Required)", ["drain"]),
        ("0x4 (Drain and Reset)", ["drain"]),
        ("0x0 (None)", []),
        ("garbled", ["warn"]),
    ],
)
def test_154_says_itself_what_is_to_be_done_and_the_last_one_counts(said: str, action: list[str]) -> None:
    text = "GPU recovery action changed from 0x0 (None) to "
    assert actions((NOW - 10, 154, text + said)) == action
    assert actions((NOW - 900, 154, text + said), (NOW - 10, 154, text + "0x0 (None)")) == []


def test_programs_faults_on_different_units_are_software_on_one_unit_hardware() -> None:
    apart = [(NOW - 1000 * n, 13, SM.format(n, n)) for n in range(1, 4)]
    same = [(NOW - 1000 * n, 31, MMU.format(n, 2)) for n in range(1, 4)]
    assert actions(*apart) == ["warn"]
    assert actions(*same) == ["evict"]
    assert actions(*same[:2]) == ["warn"]
    one_process = [(NOW - 1000 * n, 13, SM.format(77, 2)) for n in range(1, 9)]
    assert actions(*one_process) == ["warn"]  # it meets its own mistake again and again


def test_a_burst_is_one_event_and_many_events_in_a_day_drain_the_node() -> None:
    burst = [(NOW - 5000 + 20 * n, 119, "GSP RPC timeout") for n in range(50)]
    assert actions(*burst) == ["evict"]
    apart = [(NOW - 4000 * n, 119, "GSP RPC timeout") for n in range(1, 6)]
    assert actions(*apart[:4]) == ["evict"]
    assert actions(*apart) == ["drain"]
    assert actions(*[(at - 86_400, number, text) for at, number, text in apart]) == []


def test_events_outlive_the_kernels_log_and_are_not_counted_twice() -> None:
    first = [(NOW - 4000 * n, 95, "Uncontained ECC error") for n in range(1, 5)]
    _, kept = judged(*first)
    faults, kept = judged(*first, former=Former(kept, NOW))
    assert [fault.on_fail for fault in faults] == ["evict"]
    faults, _ = judged((NOW - 10, 95, "Uncontained ECC error"), former=Former(kept, NOW))
    assert [fault.on_fail for fault in faults] == ["drain"]


def test_what_is_cleared_is_over() -> None:
    event = (NOW - 100, 79, "GPU has fallen off the bus.")
    _, kept = judged(event)
    assert judged(event, former=Former(kept, NOW, cleared_s=NOW - 50))[0] == []
    assert judged(event, former=Former(kept, NOW, cleared_s=NOW - 150))[0] != []


def test_each_gpu_is_judged_by_itself_and_named_as_slurm_names_it() -> None:
    lines = tuple(
        Line(NOW - 10, f"NVRM: Xid (PCI:0000:{bus}:00): {xid}, x", True) for bus, xid in (("1b", 48), ("AB", 13))
    )
    log = KernelLog(lines, {"0000:1b:00": ("GPU-abc", 5)})
    faults = {fault.device: fault for fault in judge(log, LIMITS, Former(None, NOW))[0]}
    assert (faults["GPU-abc"].index, faults["GPU-abc"].on_fail) == (5, "evict")
    assert (faults["0000:ab:00"].index, faults["0000:ab:00"].on_fail) == (-1, "warn")


def test_a_users_line_in_the_log_is_not_the_kernels() -> None:
    record = "{},5,100000,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."
    kernel, user = parse(record.format(4)), parse(record.format(8 + 4))
    assert kernel is not None and kernel.kernel
    assert user is not None and not user.kernel


def test_addresses_are_compared_as_the_driver_writes_them() -> None:
    assert {address(one) for one in ("0000:3B:00", "00000000:3B:00.0", "3b:00")} == {"0000:3b:00"}


def test_the_table_is_whole() -> None:
    rules = policy()
    assert len(rules) >= 80
    assert [number for number, rule in rules.items() if (rule.kind == "ignore") != (rule.on_fail is None)] == []
    assert [number for number, rule in rules.items() if rule.by_unit] == [13, 31]
    assert all(rule.meaning for rule in rules.values())


@given(st.lists(st.tuples(st.floats(0, 3e5), st.text(max_size=80))), st.floats(0, 3e5))
def test_no_line_is_an_error(lines: list[tuple[float, str]], now: float) -> None:
    told = [Line(at, f"NVRM: Xid (PCI:0000:1b:00): {text}", True) for at, text in lines]
    judge(KernelLog(tuple(told)), LIMITS, Former([["x"], 5, [1, "a", 2, "b", "c"]], now))


@given(st.text())
def test_any_record_is_parsed_or_refused(text: str) -> None:
    parse(text)
