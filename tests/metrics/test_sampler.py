"""The sampling process itself: real /proc, a real ring of calls, memory that is nearly full, and its orderly end."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.metrics import textfile
from resilio_hpc.metrics.latest import read_all
from resilio_hpc.metrics.messages import AFTER, RankFacts, Sampled, SampleRequest, Setup
from resilio_hpc.metrics.sampler import Sampler
from tests.support.waiting import PATIENCE_S, until


class Process:
    """The real process, as an agent starts it."""

    def __init__(self, setup: Setup) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "resilio_hpc.metrics.sampler"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._write(setup)

    def _write(self, message: Any) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(encode_line(message))
        self._child.stdin.flush()

    def ask(self, look: SampleRequest) -> Sampled:
        assert self._child.stdout is not None
        self._write(look)
        return msgspec.json.decode(self._child.stdout.readline(), type=Sampled)

    def end(self) -> int:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        code = self._child.wait(PATIENCE_S)
        self._child.stdout.close()
        return code


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "run").mkdir()
    (tmp_path / "text").mkdir()
    return Setup("n1", "abc", str(tmp_path / "run"), str(tmp_path), 10.0, port=0, textfile=str(tmp_path / "text"))


@pytest.fixture
def process(setup: Setup) -> Iterator[Process]:
    found = Process(setup)
    yield found
    found.end()


def test_it_samples_serves_writes_and_cleans_up(setup: Setup, tmp_path: Path) -> None:
    process = Process(setup)
    run = {"run_round": 4.0, "run_phase": 3.0, "not in the schema": 1.0}
    said = process.ask(SampleRequest(1, (RankFacts(0, os.getpid(), step=3),), run, AFTER))
    assert (said.number, said.level, said.news) == (1, 0, ())
    assert said.counters is not None
    os.environ["no_proxy"] = "127.0.0.1"
    with urllib.request.urlopen(said.endpoint, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    assert 'resilio_rank_step{node="n1",rank="0",run="abc"} 3.0' in text
    assert 'resilio_run_round{node="n1",run="abc"} 4.0' in text
    assert "not in the schema" not in text
    written = textfile.path_of(setup.textfile, "abc", "n1")
    assert written.read_text() == text
    until(lambda: read_all(tmp_path / "run"), "a sample in the run directory")
    (sample,) = read_all(tmp_path / "run")
    assert (sample.node, sample.endpoint) == ("n1", said.endpoint)
    assert sample.values["run_phase"] == 3
    assert process.end() == 0
    assert not written.exists()


def test_it_ends_with_its_agent_though_it_is_killed(setup: Setup) -> None:
    program = (
        "import subprocess, sys, os; child = subprocess.Popen([sys.executable, '-m', 'resilio_hpc.metrics.sampler'], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE); child.stdin.write(sys.argv[1].encode() + b'\\n'); "
        "child.stdin.write(b'{\"number\": 1}\\n'); child.stdin.flush(); child.stdout.readline(); print(child.pid); "
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    agent = subprocess.run(
        [sys.executable, "-c", program, msgspec.json.encode(setup).decode()], stdout=subprocess.PIPE,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    pid = int(agent.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the sampler's end")


def test_a_port_in_use_is_said_and_the_rest_goes_on(setup: Setup, process: Process) -> None:
    port = int(process.ask(SampleRequest(1)).endpoint.rpartition(":")[2].partition("/")[0])
    second = Process(msgspec.structs.replace(setup, port=port, textfile=""))
    said = second.ask(SampleRequest(7))
    assert (said.number, said.endpoint) == (7, "")
    assert said.notes == (f"no endpoint at 127.0.0.1:{port}: Address already in use",)
    assert second.ask(SampleRequest(8)).notes == ()  # once
    assert second.end() == 0


def test_memory_that_is_nearly_full_is_told_once_with_the_rank_that_has_most(setup: Setup) -> None:
    sampler = Sampler(msgspec.structs.replace(setup, port=None, textfile=""))
    program = (
        "import resource, sys, time; held = bytearray(200 << 20); "
        "used = int(open('/proc/self/statm').read().split()[0]) "
        "* resource.getpagesize(); resource.setrlimit(resource.RLIMIT_AS, (int(used / 0.97),) * 2); print(); "
        "sys.stdout.flush(); time.sleep(999)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            rank.stdout.readline()
            look = SampleRequest(1, (RankFacts(5, rank.pid),))
            first, second = sampler.sample(look), sampler.sample(look)
        finally:
            rank.kill()
    (news,) = [news for news in first.news if news.subject == "rank 5"]
    assert (news.level, news.before, news.largest) == (2, 0, "rank 5")
    assert first.level == 2
    assert "address space of rank 5 (ulimit -v): 97 %" in first.memory
    assert first.memory.isascii()
    assert [news for news in second.news if news.subject == "rank 5"] == []


def test_a_run_directory_that_is_gone_is_said(setup: Setup) -> None:
    gone = Path(setup.local_dir) / "gone"
    sampler = Sampler(msgspec.structs.replace(setup, port=None, textfile=str(gone), run_path=str(gone)))
    said = sampler.sample(SampleRequest(1))
    assert any(str(gone) in note for note in said.notes)
    assert sampler._writing is not None
    assert isinstance(sampler._writing.exception(), FileNotFoundError)
    assert not gone.exists()  # a run directory that was removed is not made again
