"""Counters of errors before and after a round: which grew, and by how much; bounded."""

from __future__ import annotations

from resilio_hpc.metrics.counters import MOST, bounded, error_counters, grown
from resilio_hpc.metrics.sheet import Sheet


def test_counters_of_errors_that_are_not_zero() -> None:
    sheet = Sheet()
    sheet.put("gpu_ecc_corrected_total", 3, 1)
    sheet.put("gpu_ecc_uncorrected_total", 0, 1)
    sheet.put("network_sent_bytes_total", 10**12, "eth0")
    sheet.put("host_load1", 3)
    assert error_counters(sheet) == {"gpu_ecc_corrected_total{gpu=1}": 3}


def test_growth_and_counters_that_were_set_back() -> None:
    before = {"a": 5.0, "b": 5.0, "gone": 9.0}
    after = {"a": 7.0, "b": 2.0, "new": 4.0, "gone": 9.0}
    assert grown(before, after) == {"a": 2.0, "b": 2.0, "new": 4.0}
    assert grown(after, after) == {}


def test_an_event_holds_those_that_grew_most() -> None:
    many = {f"c{number:05d}": float(number) for number in range(10_000)}
    found = bounded(many)
    assert len(found) == MOST
    assert next(iter(found)) == "c09999"
