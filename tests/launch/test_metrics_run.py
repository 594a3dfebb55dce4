"""Under the real launcher: samples are scraped while a run trains, memory is watched in a real cgroup, and an end by
the kernel's out-of-memory killer is reported as one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.cli import main
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.metrics.latest import read_all
from tests.support.environments import scrubbed
from tests.support.requirements import need_root
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import sys, time
from pathlib import Path
from resilio_hpc import train

run = train.attach()
held = []
for step in run.steps(0, 20_000):
    if Path("grow").exists() and run.rank == 1 and len(held) < int(sys.argv[1]):
        held.append(bytearray(b"x" * (1 << 20)))
    if not Path("end").exists():
        time.sleep(0.02)
"""
LAUNCH = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--run-dir", "run")
CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 700 << 20


class Run:
    """A launch in a folder of its own."""

    def __init__(self, folder: Path, *words: str, nodes: int = 1, before: tuple[str, ...] = ()) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.folder, self.path = folder, folder / "run"
        self.process = subprocess.Popen(
            [*before, *LAUNCH, "--nproc-per-node", "2", "--metrics-interval", "0.5", *words], cwd=folder,
            env=scrubbed(RESILIO_LOCAL_NODES=str(nodes)), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def events(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            return [event.fields for event in read_ledger(self.path / "ledger") if event.kind == kind]
        return []

    def end(self) -> str:
        (self.folder / "end").touch()
        return self.process.communicate(timeout=PATIENCE_S)[1]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_samples_are_scraped_written_and_shown_and_gone_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    text = tmp_path / "textfiles"
    text.mkdir()
    run = Run(tmp_path, "--metrics-port", "0", "--metrics-textfile", str(text), "train.py", "0", nodes=2)
    try:
        until(lambda: len(run.events("metrics_endpoint")) == 2, "the endpoints", lambda: run.events("metrics_unclear"))
        urls = {fields["node"]: fields["url"] for fields in run.events("metrics_endpoint")}

        def scraped() -> dict[str, str]:
            found = {}
            for node, url in urls.items():
                with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                    found[node] = answer.read().decode()
            return found

        until(lambda: all("resilio_rank_step{" in one for one in scraped().values()), "steps of all nodes", scraped)
        pages = scraped()
        assert sum("resilio_run_phase{" in page for page in pages.values()) == 1  # where the controller is
        assert sum('rank="3"' in page for page in pages.values()) == 1
        until(lambda: len(list(text.glob("resilio-*.prom"))) == 2, "the textfiles")
        until(lambda: len(read_all(run.path)) == 2, "samples in the run directory")
        assert main.main(["metrics", str(run.path)]) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert head.split() == ["node", "age", "cpu", "memory", "gpu", "gpu", "memory", "largest", "rank", "step"]
        assert [row.split()[0] for row in rows[:2]] == sorted(urls)
        said = run.end()
        assert run.process.returncode == 0, said
    finally:
        run.kill()
    assert list(text.iterdir()) == []
    assert {fields["node"] for fields in run.events("counters") if fields["when"] == "before"} == set(urls)


@pytest.fixture
def cgroup(tmp_path: Path) -> Iterator[Path]:
    """A real memory cgroup with a limit."""
    need_root()
    v1 = (CGROUPS / "memory").is_dir()
    folder = CGROUPS / ("memory" if v1 else "") / f"resilio-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"needs a memory cgroup of its own: {error}")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text(), "the end of all its processes")
    folder.rmdir()


def inside(cgroup: Path) -> tuple[str, ...]:
    program = f"import os, sys; open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    return (sys.executable, "-c", program + "os.execv(sys.argv[1], sys.argv[1:])")


@pytest.mark.slow
def test_memory_that_fills_up_is_warned_of_before_the_kernel_kills_and_explained_after_it(
    tmp_path: Path, cgroup: Path
) -> None:
    run = Run(tmp_path, "--max-restarts", "0", "train.py", "10000", before=inside(cgroup))
    try:
        until(lambda: run.events("first_step"), "the first step")
        (tmp_path / "grow").touch()
        said = run.process.communicate(timeout=PATIENCE_S)[1]
    finally:
        run.kill()
    levels = [fields for fields in run.events("memory_warning") if fields["subject"] == "job"]
    assert levels, (said, run.events("memory_warning"))
    assert levels[0]["limit_bytes"] == LIMIT
    assert levels[0]["largest"] == "rank 1"
    assert "memory warning on" in said or "memory critical on" in said
    failed = run.events("rank_failed")[0]
    assert (failed["rank"], failed["signal"]) == (1, 9)
    assert failed["message"].startswith("killed by SIGKILL: the kernel's out-of-memory killer ended ")
    assert f"the memory limit of its cgroup, {LIMIT >> 20} MiB, was reached" in failed["message"]
