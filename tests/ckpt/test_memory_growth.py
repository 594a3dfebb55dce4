"""What saving takes beside the two arenas: little, and no more after hundreds of saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ckpt.local_node import worn_in

SCRIPT = """
import contextlib, json, os, sys, threading, time
from pathlib import Path
import numpy as np
from resilio_hpc.ckpt import Checkpointer

def private(pid):
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10

def children():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return sorted(found)

def threads(others):  # a thread that was joined may not have left the kernel's list yet
    until = time.monotonic() + 10
    while (count := len(os.listdir("/proc/self/task"))) > threading.active_count() + others:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return count

def look(checkpointer):
    checkpointer._coordinator._busy.join()  # the thread that has just told of the commit
    savers = children()
    return {
        "rank": private("self"), "saver": sum(map(private, savers)), "savers": len(savers),
        "threads": threads(not_ours), "files": len(os.listdir("/proc/self/fd")),
        "saver's files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in savers),
        "arenas": [slot.path.stat().st_size for slot in checkpointer._arenas.open()._slots],
        "on disk": sorted(path.name for path in checkpointer.directory.iterdir())[:3],
    }

directory, size, saves, every = sys.argv[1], *map(int, sys.argv[2:])
state = {"layers": [np.full(size // 8 // 8, n) for n in range(8)], "step": 0}
not_ours = len(os.listdir("/proc/self/task")) - threading.active_count()  # numpy's
checkpointer = Checkpointer(directory, keep_last=1)
found = [{"rank": private("self")}]
for step in range(1, saves + 1):
    state["step"] = step
    state["layers"][0] += 1
    checkpointer.save(step, state).wait("committed", 60)
    if step % every == 0:
        found.append(look(checkpointer))
print(json.dumps(found))
"""


def run(directory: Path, size: int, saves: int, every: int) -> list[dict[str, object]]:
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-c", SCRIPT, str(directory), str(size), str(saves), str(every)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": root})
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def number(found: dict[str, object], name: str) -> int:
    value = found[name]
    assert isinstance(value, int)
    return value


@pytest.mark.slow
def test_nothing_grows_over_two_hundred_saves(disk_path: Path) -> None:
    _, first, *_, last = run(disk_path / "checkpoints", 4 << 20, 220, 20)
    assert (last["savers"], last["arenas"]) == (1, first["arenas"])
    for name in ("threads", "files", "saver's files"):
        assert number(last, name) <= number(first, name), name  # the thread that prepares the second arena ends
    assert first["on disk"] == [*worn_in(disk_path), "latest", "step-0000000020"]
    assert last["on disk"] == [*worn_in(disk_path), "latest", "step-0000000220"]
    for name in ("rank", "saver"):
        assert number(last, name) < number(first, name) + (2 << 20), name  # the allocator takes some at a time


@pytest.mark.parametrize("size", [32 << 20, 256 << 20])
def test_beside_the_arenas_a_save_takes_less_than_sixty_four_megabytes(disk_path: Path, size: int) -> None:
    before, after = run(disk_path / "checkpoints", size, 4, 4)
    assert number(after, "rank") - number(before, "rank") + number(after, "saver") < 64 << 20
    assert after["savers"] == 1
