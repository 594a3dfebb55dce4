"""What README.md and docs/ show is typed on a dev cluster, a page at a time, and does not fail."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from tests.support import pages
from tests.support.clusters import clean, own_cluster, unique_name
from tests.support.environments import scrubbed
from tests.support.page_rehearsals import REHEARSALS

pytestmark = pytest.mark.slow

SHOWN = [page for page in pages.PAGES if page.stem in REHEARSALS and pages.to_run(page, REHEARSALS[page.stem])]


@pytest.fixture(scope="module")
def running() -> Iterator[DevCluster]:
    with own_cluster(
        "pages", why="its nodes have eight GPUs and a partition named gpu, as on the pages", nodes=5, gpus=8,
        gpu_type="h100", conf=["PartitionName=gpu Nodes=ALL MaxTime=1-0 State=UP"],
    ) as started:  # fmt: skip
        yield started


@pytest.fixture
def pages_cluster(running: DevCluster) -> Iterator[DevCluster]:
    yield running
    clean(running)


def _there(page: Path) -> bool:
    return REHEARSALS[page.stem].on_host


@pytest.mark.parametrize("page", [page for page in SHOWN if not _there(page)], ids=lambda page: page.stem)
def test_what_a_page_shows_is_typed(page: Path, pages_cluster: DevCluster) -> None:
    rehearsal = REHEARSALS[page.stem]
    folder = pages_cluster.shared / page.stem
    folder.mkdir()
    (folder / "page.sh").write_text(pages.shell_script(page, rehearsal))
    done = pages_cluster.run("ctl", ["bash", "page.sh"], 400.0, cwd=f"/shared/{page.stem}", check=False)
    wrong = pages.failures(page, rehearsal, folder)
    assert not wrong, "\n".join([*wrong, done.stdout, done.stderr])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page in SHOWN if _there(page)], ids=lambda page: page.stem)
def test_what_a_page_shows_is_typed_on_this_machine(page: Path, tmp_path: Path) -> None:
    rehearsal = REHEARSALS[page.stem]
    (tmp_path / "page.sh").write_text(pages.shell_script(page, rehearsal))
    environment = scrubbed(CLUSTER=unique_name(page.stem.lower()))
    environment["PATH"] = f"{pages.ROOT}/.venv/bin:{environment['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "page.sh"], cwd=tmp_path, env=environment, timeout=400, capture_output=True, text=True
        )
    finally:
        subprocess.run(
            ["resilio", "devcluster", "down", "--name", environment["CLUSTER"]], env=environment, timeout=60,
            capture_output=True,
        )  # fmt: skip
    wrong = pages.failures(page, rehearsal, tmp_path)
    assert not wrong, "\n".join([*wrong, done.stdout, done.stderr])
    assert done.returncode == 0, done.stdout + done.stderr
