"""The agent's end of the sampling process: rounds, answers, and a process that hangs, dies, or talks nonsense."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.launch.agent.node_metrics import AGAIN_S, MOST_DEATHS, NodeMetrics
from resilio_hpc.launch.config.metrics_options import MetricsOptions
from resilio_hpc.launch.process import process_tree
from resilio_hpc.metrics import textfile
from resilio_hpc.metrics.messages import MemoryNews, Sampled
from tests.support.waiting import PATIENCE_S, until

SECRET = b"0123456789abcdef0123456789abcdef\n"
STUCK_S = 60.0


class Node:
    """What the link needs of a NodeContext and of an agent's ranks; this process stands for rank 0."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.local_dir = path / "local"
        self.arena_dir = path / "arena"
        for folder in (self.local_dir, self.arena_dir, path / "run", path / "text"):
            folder.mkdir()
        self.run = SimpleNamespace(path=path / "run", run_id="abc", secret=SECRET)
        self.options = SimpleNamespace(metrics=MetricsOptions(**options))
        self.settings = SimpleNamespace(expected=("n1",))
        self.name = "n1"
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.gpus = (-1, -1)
        self.now = 1000.0
        self.core = SimpleNamespace(local=None, highest_round=-1, times=SimpleNamespace(gpus=self._gpus))
        self.pids: dict[int, int] = {}
        self.metrics = NodeMetrics(
            self, self.core, lambda: self.pids, lambda: {"run_phase": 3.0}, lambda: self.now, PATIENCE_S,  # type: ignore[arg-type]
        )  # fmt: skip

    def _gpus(self, slowed: int, throttle_reasons: int) -> None:
        self.gpus = (slowed, throttle_reasons)

    def record(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def say(self, line: str) -> None:
        self.said.append(line)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for told, fields in self.told if told == kind]

    def begin_round(self, number: int) -> None:
        rank = SimpleNamespace(rank=0, step=-1, step_time=0.0)
        self.core.local, self.core.highest_round = SimpleNamespace(number=number, ranks={0: rank}), number
        self.pids = {0: os.getpid()}
        self.metrics.tick()

    def end_round(self) -> None:
        self.core.local, self.pids = None, {}
        self.metrics.tick()

    @property
    def sampler(self) -> int:
        """Its process, which has to begin its program first."""

        def found() -> list[int]:
            return [pid for pid in process_tree.children(os.getpid()) if is_sampler(pid)]

        until(lambda: len(found()) == 1, "one sampler", found)
        return found()[0]

    def serve_until(self, reached: Callable[[], object], what: str) -> None:
        def look() -> bool:
            if self.metrics.fileno() is not None:
                self.metrics.serve()
            self.metrics.tick()
            return bool(reached())

        until(look, what, lambda: self.told)


def is_sampler(pid: int) -> bool:
    try:
        return b"sampler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def node(**options: Any) -> Node:
        made.append(Node(tmp_path, **options))
        return made[-1]

    yield node
    for one in made:
        one.metrics.close()


def test_nothing_runs_before_ranks_do_and_nothing_with_interval_0(make: Callable[..., Node]) -> None:
    node = make(interval_s=0.0)
    node.metrics.tick()
    node.begin_round(0)
    assert node.metrics.fileno() is None
    node.options.metrics = MetricsOptions()
    node.metrics = NodeMetrics(node, node.core, lambda: node.pids, dict, lambda: node.now)  # type: ignore[arg-type]
    node.end_round()
    assert node.metrics.fileno() is None
    node.begin_round(1)
    assert node.metrics.fileno() is not None


def test_counters_are_recorded_before_and_after_each_round(make: Callable[..., Node]) -> None:
    node = make()
    node.begin_round(0)
    node.serve_until(lambda: node.of("counters"), "the counters before")
    node.end_round()
    node.serve_until(lambda: len(node.of("counters")) == 2, "the counters after")
    before, after = node.of("counters")
    assert (before["round"], before["when"], after["round"], after["when"]) == (0, "before", 0, "after")
    assert set(after["grown"]) <= set(after["values"])
    assert "grown" not in before


def test_the_last_counters_are_taken_at_the_end(make: Callable[..., Node]) -> None:
    node = make(port=0)
    node.begin_round(3)
    node.serve_until(lambda: node.of("counters"), "the counters before")
    assert node.of("metrics_endpoint")[0]["url"].startswith("http://127.0.0.1:")
    node.metrics.close()
    assert [fields["when"] for fields in node.of("counters")] == ["before", "after"]
    assert node.metrics.fileno() is None


def test_a_stopped_process_is_replaced_and_never_waited_for(make: Callable[..., Node]) -> None:
    node = make()
    node.begin_round(0)
    node.serve_until(lambda: node.of("counters"), "a first answer")
    stopped = node.sampler
    os.kill(stopped, signal.SIGSTOP)
    node.now += 10
    node.metrics.tick()
    node.now += STUCK_S + 1
    node.metrics.tick()
    assert node.of("sampler_died") == [{"why": "has not answered for 60 s", "again": True}]
    assert node.metrics.fileno() is None
    until(lambda: not process_tree.runs(stopped), "its end")
    node.metrics.tick()
    assert node.metrics.fileno() is None  # not at once
    node.now += AGAIN_S
    node.metrics.tick()
    node.now += 10
    node.serve_until(lambda: not node.metrics._asked, "an answer of the next one")
    assert node.sampler != stopped


def test_while_a_killed_one_hangs_in_the_kernel_no_other_is_started(make: Callable[..., Node]) -> None:
    node = make()
    node.begin_round(0)
    node.serve_until(lambda: node.of("counters"), "a first answer")
    node.metrics._link.end()
    node.metrics._lost("died", node.now)
    node.metrics._killed = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]  # still there
    node.now += 100 * AGAIN_S
    node.metrics.tick()
    assert node.metrics.fileno() is None
    node.metrics._killed = SimpleNamespace(poll=lambda: -9)  # type: ignore[assignment]
    node.metrics.tick()
    assert node.metrics.fileno() is not None


def test_one_that_keeps_dying_is_given_up_and_said(make: Callable[..., Node], tmp_path: Path) -> None:
    node = make(textfile=str(tmp_path / "text"))
    left = textfile.path_of(str(tmp_path / "text"), "abc", "n1")
    left.write_text("resilio_host_load1 1\n")
    node.metrics._link._module = "metrics.no_such_module"
    node.begin_round(0)
    for _ in range(MOST_DEATHS + 3):
        if node.metrics.fileno() is not None:
            before = len(node.of("sampler_died"))
            node.serve_until(lambda before=before: len(node.of("sampler_died")) > before, "its end")  # type: ignore[misc]
        node.now += AGAIN_S + 1
        node.metrics.tick()
    assert [fields["again"] for fields in node.of("sampler_died")] == [True] * MOST_DEATHS + [False]
    (line,) = node.said
    assert "no more samples of this node" in line
    node.metrics.close()
    assert not left.exists()


def test_levels_of_memory_reach_the_ledger_and_the_heartbeats(make: Callable[..., Node]) -> None:
    node = make()
    news = MemoryNews("job", 1, 0, 95.0, 100.0, largest="rank 3", largest_bytes=60.0)
    node.metrics._take(
        Sampled(1, 1, "the job's memory limit: 95 %", (news,), ("a note",), gpus_throttled=2, throttle_reasons=64)
    )
    assert node.gpus == (2, 64)
    assert (node.metrics.level, node.metrics.memory) == (1, "the job's memory limit: 95 %")
    (warning,) = node.of("memory_warning")
    assert (warning["subject"], warning["largest"]) == ("job", "rank 3")
    assert node.of("metrics_unclear") == [{"reason": "a note"}]


def test_lines_that_are_no_answers_are_left_out(make: Callable[..., Node]) -> None:
    node = make()
    node.metrics._link = SimpleNamespace(  # type: ignore[assignment]
        read=lambda: [b"{", b'{"number": "x"}', b'{"number": 5}'], fileno=lambda: None, end=lambda: None
    )
    node.metrics.serve()
    assert node.told == []
