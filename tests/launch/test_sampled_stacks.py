"""Stacks sampled from outside: by the real py-spy, by one that hangs, fails or is gone, and of a stopped process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.launch.workers.sampled_stacks import WITHIN_S, SampledStacks, sampler
from tests.support.environments import scrubbed
from tests.support.waiting import until

Sampling = Callable[..., SampledStacks]
SCRIPT = """
import time
def waits_for_ever():
    print("up", flush=True)
    time.sleep(1000)
waits_for_ever()
"""


@pytest.fixture
def rank() -> Iterator[int]:
    """A process that hangs."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, env=scrubbed()) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        yield process.pid
        process.kill()


@pytest.fixture
def sampling() -> Iterator[Sampling]:
    """Make samplers that are closed when the test is over."""
    made: list[SampledStacks] = []

    def make(*arguments: Any) -> SampledStacks:
        made.append(SampledStacks(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def program(path: Path, text: str) -> str:
    """A program in py-spy's place."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def sampled(stacks: SampledStacks, path: Path, what: str) -> None:
    """Wait for a text in the file."""

    def there() -> bool:
        stacks.tick()
        return path.exists() and what in path.read_text()

    until(there, lambda: path.read_text() if path.exists() else "no file")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_hangs_or_is_stopped_is_sampled(
    stopped: bool, rank: int, sampling: Sampling, tmp_path: Path
) -> None:
    if not sampler():
        pytest.skip("py-spy is not installed (pip install 'resilio_hpc[stacks]')")
    if stopped:
        os.kill(rank, signal.SIGSTOP)
    stacks = sampling()
    stacks.ask({rank: tmp_path / "0.native"})
    sampled(stacks, tmp_path / "0.native", "waits_for_ever")


def test_of_several_ranks_each_has_its_file(rank: int, sampling: Sampling, tmp_path: Path) -> None:
    stacks = sampling(program(tmp_path / "py-spy", "echo stacks of $4"))
    stacks.ask({rank: tmp_path / "0", os.getpid(): tmp_path / "1"})
    sampled(stacks, tmp_path / "1", str(os.getpid()))
    assert str(rank) in (tmp_path / "0").read_text()


def test_one_that_hangs_is_ended_and_the_next_rank_has_its_turn(sampling: Sampling, tmp_path: Path) -> None:
    now = 0.0
    first, then = tmp_path / "0", tmp_path / "1"
    text = f"if [ $4 = 7 ]; then echo $$ >{first}.pid; exec sleep 1000; fi; echo $4"
    stacks = sampling(program(tmp_path / "py-spy", text), lambda: now)
    stacks.ask({7: first, 8: then})
    sampled(stacks, Path(f"{first}.pid"), "\n")
    stacks.tick()
    assert not then.exists()
    now = WITHIN_S + 1
    sampled(stacks, then, "8")
    number = int(Path(f"{first}.pid").read_text())
    until(lambda: not Path(f"/proc/{number}").exists(), lambda: f"process {number} lives")


def test_one_that_fails_is_tried_in_the_other_way_once(sampling: Sampling, tmp_path: Path) -> None:
    stacks = sampling(program(tmp_path / "py-spy", "echo tried $2; exit 1"))
    stacks.ask({1: tmp_path / "0"})
    sampled(stacks, tmp_path / "0", "tried --nonblocking")
    for _ in range(3):
        stacks.tick()
    assert (tmp_path / "0").read_text().split() == ["tried", "--native", "tried", "--nonblocking"]


@pytest.mark.parametrize("name", ["", "/nowhere/py-spy"])
def test_without_the_program_nothing_happens(name: str, sampling: Sampling, tmp_path: Path) -> None:
    stacks = sampling(name)
    stacks.ask({1: tmp_path / "0"})
    for _ in range(3):
        stacks.tick()
    stacks.close()
    assert not (tmp_path / "0").exists() or (tmp_path / "0").read_text() == ""


def test_what_is_under_way_ends_with_the_round(sampling: Sampling, tmp_path: Path) -> None:
    stacks = sampling(program(tmp_path / "py-spy", f"echo $$ >{tmp_path}/pid; exec sleep 1000"))
    stacks.ask({1: tmp_path / "0"})
    sampled(stacks, tmp_path / "pid", "\n")
    assert stacks.suspends(1) and not stacks.suspends(2)
    stacks.close()
    assert not stacks.suspends(1)
    number = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{number}").exists(), lambda: f"process {number} lives")
