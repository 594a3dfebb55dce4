"""The page of a study in a real headless Chromium: nothing is loaded, nothing goes wrong, nothing sticks out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.simulate import plan_study
from resilio_hpc.simulate.plan_study import StudyRequest
from resilio_hpc.simulate.study_page import study_page
from tests.support.report.chromium import Chromium, chromium

PEERS = StudyRequest(gpus=1024, mtbf_h=9.0, days=10.0, repeats=2)
COMPARED = StudyRequest(
    gpus=1024, mtbf_h=9.0, days=10.0, repeats=2,
    varied=(("save-every", "save_every_s", (60.0, 6000.0)), ("partner-copies", "partner_copies", (True, False))),
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as one:
        yield one


@pytest.mark.parametrize("asked", [PEERS, COMPARED], ids=["peers", "compared"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_whole(browser: Chromium, tmp_path: Path, asked: StudyRequest, scheme: str) -> None:
    file = tmp_path / "page.html"
    found = plan_study.run(asked, [])
    file.write_text(study_page(found))
    browser.open(file.as_uri(), scheme)
    assert [url for url in browser.asked if not url.startswith("data:")] == [file.as_uri()]
    assert browser.said == []
    text = browser.of("document.body.innerText")
    for words in ("Simulated goodput", "ETTR", "guess", "by_hand_s", "unknown", "a fault every"):
        assert words in text
    assert browser.of("document.querySelectorAll('#causes svg text').length") == len(found.rows)
    boxes = browser.of(
        "[...document.querySelectorAll('#causes svg text')].map(one => one.getBoundingClientRect().left)"
    )
    assert min(boxes) > 0
    assert browser.of("document.documentElement.scrollWidth <= window.innerWidth")
