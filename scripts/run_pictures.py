#!/usr/bin/env python3
"""Make the pictures of docs/watching.md from real runs on this machine: run_pictures.py FOLDER; half a minute.

Three small runs on two stand-ins of a node each: one that is fine, one whose user's bug ends it, one with a killed and
a stopped rank, which still trains while it is looked at. The page's picture needs Chromium (Debian's package chromium).
"""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.devtools.picture import WIDTH, Picture
from resilio_hpc.report.chain.run_report import read_report
from resilio_hpc.report.overview import RunReader
from resilio_hpc.report.page.page import page
from resilio_hpc.report.screen import screen

DOCS = Path(__file__).parents[1] / "docs"
LARGEST_BYTES = 250_000
PATIENCE_S = 120.0
SCRIPT = """
import math, os, time
from resilio_hpc import train
run = train.attach()
for step in run.steps(0, int(os.environ["STEPS"])):
    time.sleep(0.05)
    run.log(loss=2 + 6 * math.exp(-step / 150) + 0.2 * math.sin(step), tokens=65536)
    if step == 30 and run.rank == 1 and os.environ.get("BUG"):
        raise IndexError("list index out of range")
"""


def main(words: list[str]) -> int:
    """Make the pictures. Exit code 0; 1 where one is too large."""
    if len(words) != 1:
        raise UsageError("name an empty folder for the runs")
    folder = Path(words[0])
    (folder / "resilio-runs").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    ended = [launch(folder, "small", STEPS="60"), launch(folder, "bug", STEPS="60", BUG="1")]
    for one in ended:
        one.wait(PATIENCE_S)
    large = launch(folder, "large", STEPS="400")
    try:
        hurt(folder / "resilio-runs" / "large")
        watching(folder)
        large.wait(PATIENCE_S)
    finally:
        large.terminate()
    of_page(folder / "resilio-runs" / "large", folder)
    files = [DOCS / name for name in ("watching.svg", "top.svg", "report.png")]
    for file in files:
        print(f"docs/{file.name}: {file.stat().st_size:,} bytes")
    return int(max(file.stat().st_size for file in files) > LARGEST_BYTES)


def launch(folder: Path, name: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a run."""
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*argv, "--run-dir", f"resilio-runs/{name}", "train.py"], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "RESILIO_LOCAL_NODES": "2", **variables}, start_new_session=True,
    )  # fmt: skip


def hurt(run: Path) -> None:
    """Kill one rank of a run, stop another, and return when it trains again."""
    for recoveries, (rank, number) in enumerate([("1", signal.SIGKILL), ("2", signal.SIGSTOP)]):
        until_step(run, 60)
        pids = [event.fields["pids"] for event in read_ledger(run / "ledger") if event.kind == "ranks"]
        os.kill(next(found[rank] for found in reversed(pids) if rank in found), number)
        wait_until(lambda: len(RunReader(run).overview(time.time()).faults) > recoveries)  # noqa: B023
    until_step(run, 100)


def until_step(run: Path, step: int) -> None:
    """Return when a run trains and is at a step."""

    def is_there() -> bool:
        if not (run / "status.json").exists():
            return False
        overview = RunReader(run).overview(time.time())
        return overview.state == "running" and overview.status is not None and (overview.status.step or 0) >= step

    wait_until(is_there)


def wait_until(reached: object) -> None:
    """Return when it is reached. Raises TimeoutError."""
    assert callable(reached)
    end = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError("a run did not come so far")
        time.sleep(0.1)


def watching(folder: Path) -> None:
    """Take the pictures of the terminal."""
    view = Picture()
    overview = RunReader(folder / "resilio-runs" / "large").overview(time.time())
    view.print(screen(overview, 30, 6, view.width, internals=False))
    view.save(DOCS / "watching.svg", "resilio view large")
    top = Picture()
    top.print_written(typed(folder, "top", "--every", "1"))
    top.save(DOCS / "top.svg", "resilio top")


def typed(folder: Path, *words: str) -> str:
    """Return the screen of a command after two seconds, when q is pressed."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 12, WIDTH, 0, 0))
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", *words]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        argv, stdin=child, stdout=child, stderr=child, cwd=folder, env=environment, start_new_session=True
    )
    os.close(child)
    seen, end = bytearray(), time.monotonic() + 2.0
    try:
        while data := os.read(parent, 65536):
            seen += data
            if time.monotonic() > end:
                os.write(parent, b"q")
                end = float("inf")
    except OSError:  # the terminal's other end is closed
        pass
    os.close(parent)
    process.wait(PATIENCE_S)
    last = seen.decode().split("\x1b[H")[-1].partition("\x1b[?1049l")[0]
    return "\n".join(line.replace("\x1b[K", "").replace("\x1b[J", "") for line in last.splitlines() if line.strip())


def of_page(run: Path, folder: Path) -> None:
    """Take the picture of the report's page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise UsageError("the page's picture needs Chromium (apt-get install chromium)")
    file = folder / "report.html"
    file.write_text(page(read_report(run, time.time())))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1120,1900"]
    argv = [chromium, *flags, f"--user-data-dir={folder / 'profile'}", f"--screenshot={DOCS / 'report.png'}"]
    subprocess.run(
        [*argv, file.resolve().as_uri()], check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"run_pictures: error: {error}")
