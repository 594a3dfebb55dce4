"""PyTorch Lightning: what is its own, besides the cases that all frameworks have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks.runs import FRAMEWORKS, VARIANTS, FrameworkRun

pytestmark = pytest.mark.slow

LIGHTNING = FRAMEWORKS["lightning"]
EPOCH = 16


@pytest.mark.parametrize(
    "words",
    [
        ("--stateful",),
        ("--stateful", "--workers", "2"),
        ("--stateful", "--workers", "1", "--persistent"),
        ("--workers", "1", "--persistent"),
    ],
)
def test_loaders_with_a_state_or_workers_that_stay_go_on_under_ddp(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In the midst of an epoch, and in its first step, a rank is lost; a run is stopped, and gone on from."""
    VARIANTS["lightning-stateful"].need()
    command = [*LIGHTNING.command, "--epochs", "3", "--every", "1000", *words]
    whole, midst, first, stopped = (FrameworkRun(tmp_path / name, 2, command) for name in ("whole", "a", "b", "c"))
    whole.launch()
    midst.launch(str(EPOCH + 5), "1", "kill")
    first.launch(str(EPOCH), "1", "kill")
    assert (midst.restored()[1:], first.restored()[1:]) == ([EPOCH + 5], [EPOCH])
    stopped.stop_and_go_on(11)
    assert midst.end == first.end == stopped.end == whole.end
