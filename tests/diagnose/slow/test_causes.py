"""Why a rank is slow: a cause is named where it explains the loss, and no other rank has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilio_hpc.diagnose.slow import kernel_facts
from resilio_hpc.diagnose.slow.causes import RankPlace, SlowCause, of_gpus, of_link, of_rank
from resilio_hpc.diagnose.slow.rank_facts import NodeFacts, RankWindow

QUIET = RankWindow(3000, 2000, 100, 10)


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        ({"throttled": 2500, "queued": 2500}, SlowCause.THROTTLED),
        ({"queued": 2500}, SlowCause.NEIGHBOUR),
        ({"collecting": 2000}, SlowCause.COLLECTOR),
        ({"blocked": 60}, SlowCause.STORAGE),
        ({"throttled": 100}, SlowCause.UNKNOWN),
        ({}, SlowCause.UNKNOWN),
    ],
)
def test_the_cause_is_what_takes_the_time(seen: dict[str, Any], cause: SlowCause) -> None:
    mine = [msgspec.structs.replace(QUIET, **seen)] * 6
    assert of_rank(mine, [QUIET] * 20, 0.5, None).cause is cause


@pytest.mark.parametrize("name", ["throttled", "queued", "collecting"])
def test_what_all_ranks_have_is_no_cause(name: str) -> None:
    busy = [msgspec.structs.replace(QUIET, **{name: 2500})] * 6
    assert of_rank(busy, busy, 0.5, None).cause is SlowCause.UNKNOWN


def test_one_odd_window_is_no_cause() -> None:
    mine = [QUIET] * 5 + [msgspec.structs.replace(QUIET, throttled=5000)]
    assert of_rank(mine, [QUIET] * 20, 0.5, None).cause is SlowCause.UNKNOWN


def test_a_rank_that_waits_for_its_loader_is_told_with_the_line() -> None:
    found = of_rank([QUIET] * 6, [QUIET] * 6, 0.5, RankPlace("train.py:40", 10, 7))
    assert found.cause is SlowCause.LOADER
    assert "train.py:40" in found.evidence
    unknown = of_rank([QUIET] * 6, [QUIET] * 6, 0.5, RankPlace("train.py:44", 10, 1))
    assert unknown.cause is SlowCause.UNKNOWN
    assert "train.py:44" in unknown.evidence


def nodes(**odd: Any) -> dict[str, list[NodeFacts]]:
    usual = NodeFacts(sent=1000, trip=400)
    found = {f"n{number}": [usual] * 6 for number in range(1, 5)}
    return found | {node: [msgspec.structs.replace(usual, **facts)] * 6 for node, facts in odd.items()}


def test_the_node_of_a_slow_link_is_named() -> None:
    for odd in ({"resent": 200}, {"trip": 30_000}, {"backed_up": 80}):
        found = of_link(nodes(n3=odd), "n1")
        assert found is not None
        assert (found[0], found[1].cause) == ("n3", SlowCause.LINK)
    assert of_link(nodes(**{f"n{number}": {"backed_up": 60 + number} for number in range(1, 5)}), "n1") is None
    assert of_link(nodes(), "n1") is None


def test_a_link_of_the_controllers_node_slows_all_answers_but_its_own() -> None:
    slow = {"trip": 40_000}
    found = of_link(nodes(n2=slow, n3=slow, n4=slow), "n1")
    assert found is not None
    assert found[0] == "n1"


def test_two_nodes_alike_are_not_blamed() -> None:
    slow = {"resent": 300}
    assert of_link(nodes(n2=slow, n3=slow), "n1") is None


def test_one_node_whose_gpus_are_held_down_is_named_with_the_reason() -> None:
    reasons = {0x40: "heat", 0x80: "the power supply", 0x08: "the hardware", 0x48: "heat and the hardware"}
    for bits, why in reasons.items():
        found = of_gpus(nodes(n3={"gpus_throttled": 1, "throttle_reasons": bits}))
        assert found is not None
        assert (found[0], found[1].cause) == ("n3", SlowCause.GPU)
        assert found[1].evidence.endswith(f"throttled by {why}")
    hot = {"gpus_throttled": 8, "throttle_reasons": 0x40}
    assert of_gpus(nodes(n2=hot, n3=hot)) is None
    assert of_gpus(nodes()) is None


def test_what_the_kernel_counts_is_read_from_both_kinds_of_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "schedstat").write_text("100 250 3\n")
    assert kernel_facts.queued_ns(7, proc) == 250
    (proc / "7" / "cgroup").write_text("0::/job/step\n")
    for path, value in (("job/step", 2000), ("job", 500)):
        (groups / path).mkdir(parents=True, exist_ok=True)
        (groups / path / "cpu.stat").write_text(f"usage_usec 9\nnr_throttled 3\nthrottled_usec {value}\n")
    assert kernel_facts.throttled_ns(7, proc, groups) == 2_500_000
    (proc / "7" / "cgroup").write_text("4:cpu,cpuacct:/job\n3:memory:/other\n")
    (groups / "cpu,cpuacct" / "job").mkdir(parents=True)
    (groups / "cpu,cpuacct" / "job" / "cpu.stat").write_text("nr_periods 3\nnr_throttled 2\nthrottled_time 700\n")
    assert kernel_facts.throttled_ns(7, proc, groups) == 700
    (proc / "7" / "cgroup").write_text("0::/../../etc\nnonsense\n")
    assert kernel_facts.throttled_ns(7, proc, groups) == 0
    assert kernel_facts.throttled_ns(8, proc, groups) == 0


def test_what_the_kernel_counts_of_a_node_is_read(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "io").write_text("some avg10=0.00 total=4711\nfull avg10=0.00 total=12\n")
    assert kernel_facts.storage_us(tmp_path) == 4711
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "snmp").write_text("Ip: A\nIp: 1\nTcp: OutSegs RetransSegs\nTcp: 50 6\n")
    assert kernel_facts.segments(tmp_path) == (50, 6)
    for device, errors in (("eth0", 3), ("lo", 100)):
        (tmp_path / "net2" / device / "statistics").mkdir(parents=True)
        (tmp_path / "net2" / device / "statistics" / "rx_errors").write_text(f"{errors}\n")
    assert kernel_facts.network_errors(tmp_path / "net2") == 3
    nowhere = tmp_path / "none"
    assert (kernel_facts.storage_us(nowhere), kernel_facts.segments(nowhere)) == (0, (0, 0))


def test_the_account_of_a_rank_takes_few_bytes() -> None:
    full = RankWindow(4999, 4999, 60_000, 4999, 99_000_000, 4999, 4999, 100, 4999)
    assert len(msgspec.msgpack.encode(full)) <= 32
