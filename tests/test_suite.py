"""The order of tests, their parts and their recorded durations: pure functions on tables."""

from __future__ import annotations

import pytest

from tests.support import durations, scheduling
from tests.support.part_results import told

SLURM = "tests/on_slurm/test_a.py::test_one[x]"
TESTS = ["tests/b/test_b.py::test_1", SLURM, "tests/b/test_b.py::test_2", "tests/on_slurm/test_a.py::test_two"]
SECONDS = {TESTS[0]: 2.0, SLURM: 30.0, TESTS[2]: 3.0, TESTS[3]: 1.0}


def test_the_longest_unit_comes_first_and_a_file_stays_together() -> None:
    assert scheduling.units(TESTS, SECONDS) == [
        (SLURM, 30.0), ("tests/b/test_b.py", 5.0), ("tests/on_slurm/test_a.py::test_two", 1.0),
    ]  # fmt: skip
    assert scheduling.in_order(TESTS, SECONDS) == [1, 0, 2, 3]


def test_tests_that_wait_and_tests_that_compute_advance_alike() -> None:
    waiting = {f"tests/on_slurm/test_a.py::test_{number}": 10.0 - number for number in range(10)}
    computing = {f"tests/b/test_{number}.py": 1.0 for number in range(100)}
    whole = waiting | computing
    order = scheduling.mixed(sorted(whole.items(), key=lambda unit: -unit[1]))
    assert sorted(order) == sorted(whole)
    assert [unit for unit in order if unit in waiting] == list(waiting)
    for count in range(1, len(order)):
        shares = [
            sum(kind.get(unit, 0.0) for unit in order[:count]) / sum(kind.values()) for kind in (waiting, computing)
        ]
        assert abs(shares[0] - shares[1]) <= 0.2
    assert scheduling.mixed([]) == []


def test_the_parts_hold_every_unit_once_in_whatever_order_it_is_asked() -> None:
    parts = [scheduling.of_part(tests, number, 2) for number, tests in ((1, TESTS), (2, TESTS[::-1]))]
    assert parts == [{"tests/b/test_b.py", "tests/on_slurm/test_a.py::test_two"}, {SLURM}]


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "a/b", "1/0"])
def test_what_is_no_part_is_said_so(text: str) -> None:
    with pytest.raises(ValueError, match="give K/N"):
        scheduling.part(text)


def test_a_busy_machine_changes_no_recorded_duration() -> None:
    before = {"quick": {"a": 1.0, "b": 2.0, "c": 4.0}}
    assert durations.merge(before, {"quick": {"a": 3.0, "b": 6.0, "c": 12.0}}, True) == before


def test_a_test_that_was_recorded_as_instant_is_no_measure() -> None:
    assert durations.merge({"quick": {"a": 0.0}}, {"quick": {"a": 2.0}}, True) == {"quick": {"a": 2.0}}


def test_one_test_that_got_slower_is_recorded_and_one_that_is_gone_is_not() -> None:
    others = {f"t{number}": 2.0 for number in range(20)}
    before = {"quick": {**others, "c": 4.0, "gone": 1.0}, "slow": {"s": 9.0}}
    now = {"quick": {**others, "c": 9.0, "new": 0.1}}
    assert durations.merge(before, now, True) == {"quick": {**others, "c": 9.0}, "slow": {"s": 9.0}}


def test_a_load_that_stretches_some_tests_more_than_others_makes_none_slower() -> None:
    before = {
        "quick": {f"t{number}": 2.0 for number in range(20)},
        "slurm": {f"w{number}": 5.0 for number in range(20)},
    }
    now = {
        "quick": {f"t{number}": 2.0 * (1 + number / 5) for number in range(20)},
        "slurm": {f"w{number}": 5.5 for number in range(20)},
    }
    merged = durations.merge(before, now, True)
    assert merged["slurm"] == before["slurm"]
    assert max(merged["quick"].values()) == 2.0


def test_a_run_of_some_tests_loses_no_other_and_a_test_has_one_kind() -> None:
    before = {"quick": {"a": 1.0, "b": 2.0}, "slow": {"s": 9.0}}
    found = durations.merge(before, {"slow": {"b": 2.0}}, False)
    assert found == {"quick": {"a": 1.0}, "slow": {"s": 9.0, "b": 2.0}}


def test_a_folder_called_slurm_is_no_mark() -> None:
    assert durations.kind_of("tests/slurm/test_a.py::test_b", {"slurm": 1, "tests": 1}) == "quick"
    assert durations.kind_of(SLURM, {"slurm": 1}) == "slurm"
    assert durations.kind_of(SLURM, {"slurm": 1, "slow": 1}) == "slow"


def test_only_a_test_without_a_mark_may_be_too_slow() -> None:
    recorded = {"quick": {"a": 5.1, "b": 5.0}, "slow": {"c": 90.0}, "slurm": {"d": 60.0}}
    assert durations.too_slow(recorded) == ["a: 5.1 s, without mark"]


def test_the_results_of_all_parts_are_told_with_those_that_lack() -> None:
    one = {"began": "2026-01-02 03:04", "seconds": 120, "commit": "abc", "passed": 3, "failed": ["t"], "skipped": 0,
           "rooms": {"ckpt": 4}}  # fmt: skip
    lines = told({"2/3": one})
    assert lines[-1] == "  not run yet: 1/3, 3/3"
    assert "    failed: t" in lines
