"""The page in a real headless Chromium: nothing is loaded, nothing goes wrong, and the keyboard reaches all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.report.chain.run_report import read_report
from resilio_hpc.report.page.page import page
from tests.support.report.chromium import Chromium, chromium
from tests.support.report.hostile_run import HOSTILE, write_hostile_run
from tests.support.report.long_runs import BEGAN, LongRun, write_run


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as one:
        yield one


def shown(run: Path) -> str:
    """The address of the page of a run."""
    file = run.with_suffix(".html")
    file.write_text(page(read_report(run, BEGAN + 40 * 86_400)))
    return file.as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shown(write_run(tmp_path_factory.mktemp("long") / "run", LongRun(64, 3.0, 60)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_loaded_and_nothing_goes_wrong(browser: Chromium, address: str, scheme: str) -> None:
    browser.open(address, scheme)
    assert [url for url in browser.asked if not url.startswith("data:")] == [address]
    assert browser.said == []
    text = browser.of("document.body.innerText")
    for words in ("goodput", "ETTR", "Time by cause", "Recoveries", "What to change", "automatic"):
        assert words in text
    assert browser.of("document.querySelectorAll('script,link[rel=stylesheet],img,iframe').length") == 0


def test_the_dark_scheme_is_dark_and_readable(browser: Chromium, address: str) -> None:
    light, dark = (seen_colours(browser, address, scheme) for scheme in ("light", "dark"))
    for back, ink, dim in (light, dark):
        assert contrast(back, ink) >= 7.0
        assert contrast(back, dim) >= 4.5
    assert luminance(dark[0]) < 0.1 < luminance(light[0])


def test_the_keyboard_reaches_every_part_in_order(browser: Chromium, address: str) -> None:
    browser.open(address)
    reached = []
    for _ in range(12):
        browser.press("Tab")
        reached.append(browser.of("document.activeElement.textContent.trim() || document.activeElement.ariaLabel"))
    assert reached[:7] == ["Skip the pictures", "Timeline", "Time by cause", "Recoveries", "Checkpoints", "Cost",
                           "What to change"]  # fmt: skip
    labels = browser.of("[...document.querySelectorAll('[tabindex]')].map(one => one.getAttribute('aria-label'))")
    assert labels[:4] == ["Nodes", "Shares of time", "Steps", "Time by cause"]
    browser.of("document.querySelector('details summary').focus()")
    assert not browser.of("document.querySelector('details').open")
    browser.press("Enter")
    assert browser.of("document.querySelector('details').open")
    assert ".jsonl:" in browser.of("document.querySelector('details').innerText")


def test_labels_do_not_overlap_and_nothing_sticks_out(browser: Chromium, address: str) -> None:
    browser.open(address)
    boxes = browser.of(
        "[...document.querySelectorAll('svg text')].map(one => {const b = one.getBoundingClientRect();"
        "return [b.left, b.right, b.top + 2, b.bottom - 2, one.textContent]})"
    )
    assert len(boxes) > 40
    overlaps = [
        (one[4], other[4])
        for number, one in enumerate(boxes) for other in boxes[number + 1 :]
        if one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
    ]  # fmt: skip
    assert overlaps == []
    assert browser.of("document.documentElement.scrollWidth <= window.innerWidth")
    browser.open(address, width=420)
    assert browser.of("document.documentElement.scrollWidth <= window.innerWidth")


def test_hostile_texts_of_a_ledger_stay_texts(browser: Chromium, tmp_path: Path) -> None:
    address = shown(write_hostile_run(tmp_path / "run"))
    browser.open(address)
    assert [url for url in browser.asked if not url.startswith("data:")] == [address]
    assert browser.said == []
    assert browser.of("window.hit") is None
    assert browser.of("document.querySelectorAll('script,img,b,iframe').length") == 0
    assert HOSTILE[:20] in browser.of("document.body.textContent")


def seen_colours(browser: Chromium, address: str, scheme: str) -> list[list[float]]:
    """Background, text and dim text, as red, green and blue."""
    browser.open(address, scheme)
    of = "getComputedStyle(document.querySelector('{}')).{}.match(/[0-9.]+/g).slice(0, 3).map(Number)"
    return [browser.of(of.format(*one)) for one in (("body", "backgroundColor"), ("body", "color"), (".dim", "color"))]


def luminance(colour: list[float]) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    """Contrast ratio (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
