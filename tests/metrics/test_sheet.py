"""A sample takes numbers of the schema, and nothing that a device, a name or a rank makes of it."""

from __future__ import annotations

import math

import pytest

from resilio_hpc.metrics.sheet import LONGEST_LABEL, MOST_SERIES, Sheet, neutral, series


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "12", b"1", [1], 10**400, -(10**400)])
def test_what_is_no_number_is_left_out_and_counted(value: object) -> None:
    sheet = Sheet()
    sheet.put("host_load1", value)
    assert (dict(sheet.items()), sheet.refused) == ({}, 1)


def test_a_counter_is_never_below_zero_and_a_gauge_may_be() -> None:
    sheet = Sheet()
    sheet.put("tcp_sent_segments_total", -1)
    sheet.put("gpu_temperature_celsius", -5, 0)
    assert dict(sheet.items()) == {("gpu_temperature_celsius", ("0",)): -5.0}


def test_none_is_left_out_and_is_not_zero() -> None:
    sheet = Sheet()
    sheet.put("host_swap_used_bytes", None)
    assert sheet.get("host_swap_used_bytes") is None
    assert sheet.refused == 0


def test_labels_are_neutral_and_short() -> None:
    sheet = Sheet()
    sheet.put("network_sent_bytes_total", 1, 'ib0"} 1\nevil{x="\x1b[31m\\' + "x" * 1000)
    ((_, (label,)),) = [key for key, _ in sheet.items()]
    assert len(label) == LONGEST_LABEL
    assert not set(label) & set('"\\{}\n\x1b')
    assert neutral("mlx5_0/1") == "mlx5_0/1"


def test_series_are_bounded() -> None:
    sheet = Sheet()
    for number in range(MOST_SERIES + 100):
        sheet.put("network_sent_bytes_total", 1, f"veth{number}")
    assert len(list(sheet.items())) == MOST_SERIES
    assert sheet.refused == 100
    other = Sheet()
    other.put("host_load1", 1.0)
    other.update(sheet)
    assert len(list(other.items())) == MOST_SERIES


def test_a_name_outside_of_the_schema_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Sheet().put("something_else", 1)
    with pytest.raises(AssertionError):
        Sheet().put("host_load1", 1, "label")


def test_a_series_has_a_name_in_files() -> None:
    assert series(("rank_op_calls_total", ("3", "all_reduce"))) == "rank_op_calls_total{rank=3,op=all_reduce}"
    assert series(("host_load1", ())) == "host_load1"
