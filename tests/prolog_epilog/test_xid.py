"""Xids: each does what the table says; bursts are one event; 13 and 31 by unit; many of one GPU are worse than each."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.prolog_epilog.base.check import Fault, Former, Thresholds
from resilio_hpc.prolog_epilog.checks.kernel_log import KernelLog, Line, parse
from resilio_hpc.prolog_epilog.checks.xid import judge, policy
from resilio_hpc.prolog_epilog.checks.xid_events import address

LIMITS = Thresholds({"burst_s": 180, "escalate": 5, "escalate_window_s": 86400, "same_unit": 3})
NOW = 200_000.0
SM = "pid={}, name={}, Graphics SM Warp Exception on (GPC 3, TPC {}, SM 1): Illegal Instruction"
MMU = "pid={}, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS {}GPCCLIENT_T1_2 faulted @ 0x7fb3"
RECOVERY = "GPU recovery action changed from "


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
     (119, "evict"), (54, "drain"), (79, "drain"), (151, "drain"), (142, "drain"), (9999, "warn"), (159, "warn"),
     (162, None), (167, "warn"), (172, "warn")],
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
    text = f"{RECOVERY}0x0 (None) to "
    assert actions((NOW - 10, 154, text + said)) == action
    for apart in (890, 1, 0):  # a burst ends with its last line
        assert actions((NOW - 900, 154, text + said), (NOW - 900 + apart, 154, text + "0x0 (None)")) == []
        assert (
            actions((NOW - 900, 154, text + "0x1 (GPU Reset Required)"), (NOW - 900 + apart, 154, text + said))
            == action
        )


def test_a_reset_that_154_tells_of_ends_what_asked_for_it_and_nothing_else() -> None:
    done = (NOW - 100, 154, f"{RECOVERY}0x1 (GPU Reset Required) to 0x0 (None)")
    uncontained = (NOW - 500, 95, "Uncontained: LTC TAG")
    assert actions(uncontained, (NOW - 499, 154, f"{RECOVERY}0x0 (None) to 0x1 (GPU Reset Required)"), done) == []
    assert actions((NOW - 500, 79, "GPU has fallen off the bus."), done) == ["drain"]
    assert actions(done, (NOW - 50, 95, "Uncontained: LTC TAG")) == ["evict"]
    assert actions(uncontained, (NOW - 100, 154, f"{RECOVERY}0x3 (Drain P2P) to 0x0 (None)")) == ["evict"]
    assert actions(*[(NOW - 1000 * n, 95, "Uncontained") for n in range(1, 6)], done) == ["drain"]  # five in a day


@pytest.mark.parametrize(
    ("address_told", "named"),
    [("PCI:0000:65:00 GPU-I:05", "0000:65:00"), ("PCI:0000:65:00 GPU-I:01 GPU-CI:00", "0000:65:00"),
     ("0000:65:00", "0000:65:00"), ("PCI:00000000:65:00.0", "0000:65:00"), ("65:00", "0000:65:00")],
)  # fmt: skip
def test_instances_and_old_drivers_name_their_gpu_in_other_ways(address_told: str, named: str) -> None:
    line = Line(NOW - 10, f"NVRM: Xid ({address_told}): 95, pid=7, name=python3, Uncontained: LTC TAG (0x2,0x0)", True)
    faults, _ = judge(KernelLog((line,)), LIMITS, Former(None, NOW))
    assert [(fault.device, fault.on_fail) for fault in faults] == [(named, "evict")]


@pytest.mark.parametrize("xid", range(144, 151))
def test_nvlink_errors_that_call_themselves_nonfatal_only_warn(xid: int) -> None:
    told = "TLW_RX {} XC0 i0 Link 04 (0x00086226 0x00000001 0x0)"
    assert actions((NOW - 10, xid, told.format("Nonfatal"))) == ["warn"]
    assert actions((NOW - 10, xid, told.format("Fatal"))) == ["evict"]
    assert actions(*[(NOW - 1000 * n, xid, told.format("Nonfatal")) for n in range(1, 9)]) == ["warn"]


def by_programs(*who: tuple[int, str], unit: int = 2) -> list[tuple[float, int, str]]:
    return [(NOW - 1000 * n, 13, SM.format(*one, unit)) for n, one in enumerate(who, 1)]


PYTHONS = ((1, "python"), (2, "python"), (3, "python"))


def test_what_different_programs_meet_on_one_unit_and_nowhere_else_is_hardware() -> None:
    assert actions(*by_programs(*PYTHONS)) == ["evict"]  # which programs they run is not told
    assert actions(*by_programs((1, "vasp"), (2, "gmx"), (3, "lmp"))) == ["evict"]
    assert actions(*by_programs(*[(n, "pt_main_thread") for n in range(1, 4)])) == ["evict"]
    assert actions(*[(NOW - 1000 * n, 31, MMU.format(n, "GPC5 ")) for n in range(1, 4)]) == ["evict"]


def test_what_a_program_may_have_done_by_itself_is_not_hardware() -> None:
    assert actions(*by_programs(*PYTHONS[:2])) == ["warn"]
    for name in ("vasp", "raytracer", "<unknown>"):  # one program, started again
        assert actions(*by_programs((1, name), (2, name), (3, name))) == ["warn"]
    assert actions(*by_programs(*[(77, "python")] * 8)) == ["warn"]  # it meets its own mistake again and again
    assert actions(*by_programs(*[("'<unknown>'", "<unknown>")] * 8)) == ["warn"]  # type: ignore[list-item]
    on_all = [one for unit in range(6) for one in by_programs(*PYTHONS, unit=unit)]
    assert actions(*on_all) == ["warn"]
    assert actions(*[(NOW - 1000 * n, 31, MMU.format(n, "")) for n in range(1, 9)]) == ["warn"]  # any GPC's client


@pytest.mark.parametrize(
    ("users", "action"), [([{1001}, {1001}, {1001}], "warn"), ([{1001}, {1001, 1002}, {1003}], "evict")]
)
def test_what_one_user_may_have_done_is_not_hardware(users: list[set[int]], action: str) -> None:
    """Looks between which a process of a user met the Xid; the last user stays until the next look."""
    kept: object = None
    faults: list[Fault] = []
    for n, present in enumerate(users):
        _, kept = judge(KernelLog((), users=frozenset(present)), LIMITS, Former(kept, 1000.0 * n + 500))
        line = Line(1000.0 * n + 510, f"NVRM: Xid (PCI:0000:1b:00): 13, {SM.format(n, 'python', 2)}", True)
        found, kept = judge(KernelLog((line,), users=frozenset(present)), LIMITS, Former(kept, 1000.0 * n + 520))
        kept = msgspec.json.decode(msgspec.json.encode(kept))
        faults = list(found)
    assert [fault.on_fail for fault in faults] == [action]


def test_a_storm_of_echoes_does_not_push_out_what_is_kept_of_faulty_hardware() -> None:
    _, kept = judged((NOW - 9000, 79, "GPU has fallen off the bus."))
    storm = [(NOW - 8000 + n, 45, f"pid={n}, name=python3, Ch {n:08x}") for n in range(1200)]
    _, kept = judged(*storm, former=Former(kept, NOW))
    assert [fault.on_fail for fault in judged(former=Former(kept, NOW))[0]] == ["drain"]


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
    judge(KernelLog(tuple(told)), LIMITS, Former({"events": [[1, "a", 2, "b", "c", []]], "users": ["x"]}, now))


@given(st.text())
def test_any_record_is_parsed_or_refused(text: str) -> None:
    parse(text)
