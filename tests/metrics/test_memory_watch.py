"""Levels of memory: told once, ended later than begun, with a trend that single samples do not change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.metrics.memory_watch import AGAIN_S, MemoryUsed, MemoryWatch, slope, uses_of
from resilio_hpc.metrics.messages import MemoryNews
from resilio_hpc.metrics.sheet import Sheet

GIB = 2**30
NONE = ("", 0.0)


def told(shares: list[float], every_s: float = 10.0, reserve: float = 0.0) -> list[tuple[int, int]]:
    """(number of the sample, level) of what is reported."""
    watch = MemoryWatch()
    found = []
    for number, share in enumerate(shares):
        uses = [MemoryUsed("host", share * 100, 100.0, reserve)]
        found += [(number, news.level) for news in watch.look(uses, NONE, number * every_s)]
    return found


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.5, 0.89, 0.899], []),
        ([0.5, 0.90, 0.91, 0.92], [(1, 1)]),
        ([0.5, 0.96], [(1, 2)]),
        ([0.91, 0.96, 0.97], [(0, 1), (1, 2)]),
        ([0.91, 0.86, 0.91, 0.86, 0.91], [(0, 1)]),  # it ends only below 85 %
        ([0.91, 0.84, 0.5], [(0, 1), (1, 0)]),
        ([0.96, 0.92, 0.96], [(0, 2)]),
        ([0.91, 0.8, 0.91, 0.8], [(0, 1), (1, 0), (3, 0)]),  # the same level is not told again so soon
        ([1.5], [(0, 2)]),
    ],
)
def test_levels(shares: list[float], expected: list[tuple[int, int]]) -> None:
    assert told(shares) == expected


def test_a_level_is_told_again_after_a_while() -> None:
    assert told([0.91, 0.5, 0.91], AGAIN_S) == [(0, 1), (1, 0), (2, 1)]


def test_a_gpu_warns_where_its_headroom_is_used_and_is_never_critical() -> None:
    assert told([0.94, 0.951, 0.999, 0.96, 0.94, 0.92], reserve=5.0) == [(1, 1), (5, 0)]


def test_the_news_say_when_it_is_full_and_who_has_most() -> None:
    watch = MemoryWatch()
    news: list[MemoryNews] = []
    for number in range(20):
        news += watch.look([MemoryUsed("job", 80.0 + number, 100.0)], ("rank 3", 60.0), number * 10.0)
    (warning, critical) = news
    assert (warning.level, warning.before, critical.level) == (1, 0, 2)
    assert warning.grows_bytes_per_s == pytest.approx(0.1)
    assert warning.full_in_s == pytest.approx(100.0)
    assert (critical.largest, critical.largest_bytes) == ("rank 3", 60.0)
    assert watch.worst is not None and watch.worst.level == 2
    sheet = Sheet()
    watch.put(sheet)
    assert sheet.get("memory_level", "job") == 2


def test_what_is_gone_is_no_longer_watched() -> None:
    watch = MemoryWatch()
    watch.look([MemoryUsed("rank 3", 99.0, 100.0)], NONE, 0.0)
    assert watch.worst is not None
    assert watch.look([], NONE, 10.0) == []
    assert watch.worst is None


def test_a_steady_growth_is_seen_through_noise_and_peaks() -> None:
    leak = [(10.0 * n, 50.0 + n * 0.5 + (n % 3) * 0.3 + (40.0 if n % 7 == 0 else 0.0)) for n in range(30)]
    assert slope(leak, 0.2) == pytest.approx(0.05, rel=0.2)
    noise = [(10.0 * n, 50.0 + (n * 7919 % 13) * 0.01) for n in range(30)]
    assert slope(noise, 0.2) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e18)), max_size=30), st.floats(0, 1e18))
def test_any_history_has_a_finite_slope(history: list[tuple[float, float]], least: float) -> None:
    history.sort()
    assert slope(history, least) == slope(history, least)  # no NaN


@given(st.lists(st.floats(0, 2), min_size=1, max_size=200))
def test_no_level_is_told_twice_within_its_time(shares: list[float]) -> None:
    last: dict[int, int] = {}
    for number, level in told(shares):
        if level:
            assert number * 10 - last.get(level, -1000) >= AGAIN_S
            last[level] = number * 10


def sample(**values: float) -> Sheet:
    sheet = Sheet()
    for name, value in values.items():
        sheet.put(name, value)
    return sheet


def test_only_what_is_known_is_watched() -> None:
    assert uses_of(sample(host_memory_total_bytes=100), [], None) == []
    assert uses_of(sample(job_memory_limit_bytes=100), [], None) == []
    both = sample(
        host_memory_total_bytes=100, host_memory_available_bytes=40, job_memory_limit_bytes=50, job_memory_used_bytes=49
    )
    assert [(use.subject, use.used_bytes) for use in uses_of(both, [], None)] == [("host", 60), ("job", 49)]
    both.put("job_memory_limit_bytes", 1000)  # above the memory of the machine, it is no limit
    assert [use.subject for use in uses_of(both, [], None)] == ["host"]


@pytest.mark.parametrize(
    ("headroom", "total_gib", "reserve"),
    [(None, 80, 4 * GIB), (None, 141, 7.05 * GIB), (2 * GIB, 80, 2 * GIB), (0, 80, None), (100 * GIB, 80, None)],
)
def test_a_gpu_s_headroom(headroom: int | None, total_gib: int, reserve: float | None) -> None:
    sheet = Sheet()
    sheet.put("gpu_memory_total_bytes", total_gib * GIB, 0)
    sheet.put("gpu_memory_used_bytes", GIB, 0)
    sheet.put("gpu_memory_total_bytes", total_gib * GIB, 1)  # what it uses is not known
    found = uses_of(sheet, [], headroom)
    assert [use.subject for use in found] == ([] if reserve is None else ["gpu 0"])
    assert [use.reserve_bytes for use in found] == pytest.approx([] if reserve is None else [reserve])
