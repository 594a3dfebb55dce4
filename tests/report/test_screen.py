"""The screen of ``resilio view`` and ``status`` in small terminals: no line is broken, and the facts are there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from resilio_hpc.core.ledger import Ledger
from resilio_hpc.report.overview import RunReader
from resilio_hpc.report.screen import screen
from resilio_hpc.report.screen_tables import domain_of
from resilio_hpc.report.status import NodeStatus
from tests.support.pseudo_terminal import shown, too_long

NOW = 50_000.0
SIZES = [(100, 50), (80, 23), (60, 19)]
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def plain_name(number: int) -> str:
    return f"n{number}"


def long_name(number: int) -> str:
    return f"gpu-rack{number // 16:02d}-chassis{number % 16:02d}-node{number:04d}.cluster.example.org"


def wide_name(number: int) -> str:
    return f"節点{number}\x1b[31m"


NAMES = [plain_name, long_name, wide_name]


class Ticks:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def made(path: Path, name: object, nodes: int, faults: int, now: float = NOW) -> Path:
    """Write a run of two jobs as the product's ledger does, with as many nodes, a lost one, and faults."""
    assert callable(name)
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": "735e298d381d", "created": now - 7200}))
    agents = {
        name(number): {"silent_s": 0.1, "step": 100_000 + number % 3, "step_s": 0.8 if number == 1 else 0.5}
        for number in range(nodes + 1)
        if number != nodes - 1
    }
    members = [{"node": name(number), "local_world_size": 8, "first_rank": 8 * number} for number in range(nodes)]
    status = {"v": 1, "time": now, "epoch": 12, "controller": name(3), "phase": "running", "round": 41, "restarts": 17,
              "without_progress": 2, "committed": 99_980, "members": members, "agents": agents,
              "lost": [name(nodes - 1)]}  # fmt: skip
    (path / "status.json").write_text(json.dumps(status))
    for link in (1, 2):
        clock = Ticks(now - 7000 + 4000 * (link - 1))
        Ledger(path / "ledger", f"{link}-supervisor-main", clock=clock).append("launch", job=f"710{link}", link=link)
        ledger = Ledger(path / "ledger", f"{link}-n3-agent", clock=clock)
        ledger.append("first_step", round=0, step=1, restored=-1)
        for number in range(faults):
            clock.now += 100
            failure = {"round": number, "node": name(number), "rank": 8 * number, "kind": "exit", "exit_code": 1}
            ledger.append("rank_failed", **failure, message=ECC, place="train.py:88")
            ledger.append("rank_failed", **failure, message="connection reset by peer", echo=True)
            ledger.append("decision", rung="replace_node", reason="a spare takes the place", round=number)
            clock.now += 22
            ledger.append("first_step", round=number + 1, step=99_000, restored=98_980, source="memory", restore_s=1.2)
            ledger.append(
                "recovered", kind="rank_exception", node=name(number), rank=8 * number, recovery_s=22.1, lost_steps=21,
                plan="replace_node", round=number + 1, at=clock.now,
            )  # fmt: skip
            ledger.append("committed", step=99_980, blocked_s=0.31)
    return path


def drawn(path: Path, width: int, height: int, recent: int = 5) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(screen(RunReader(path).overview(NOW + 1), height, recent, width))
    return captured.get().splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("nodes", "faults"), [(4, 0), (4, 2), (30, 2), (1000, 0), (1000, 30)])
def test_it_fits(tmp_path: Path, width: int, height: int, name: object, nodes: int, faults: int) -> None:
    lines = drawn(made(tmp_path / "run", name, nodes, faults), width, height)
    assert [line for line in lines if cell_len(line) > width] == []
    assert len(lines) <= height
    text = "\n".join(lines)
    for fact in ("735e298d381d", "running", "7102, the 2nd of this run", "41: ", "100002", "step 99980", "17, 2 since"):
        assert fact in text
    assert "lost" in text and "\x1b[31m" not in text
    assert ("22.1 s" in text) == (faults > 0)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_of_many_nodes_those_that_need_a_look_come_first(tmp_path: Path, width: int, height: int) -> None:
    lines = drawn(made(tmp_path / "run", long_name, 1000, 30), width, height)
    head = next(number for number, line in enumerate(lines) if line.startswith("node"))
    assert lines[head + 1].split()[1] == "lost" and "node0999" in lines[head + 1]
    assert "node0001" in lines[head + 2], "the slowest one"
    (more,) = [line for line in lines if "more nodes: " in line]
    hidden = int(more.split()[1])
    assert hidden + sum(line.startswith("gpu-rack") for line in lines) == 1001
    assert "1 spare" in more and f"{hidden - 1} training" in more
    (before,) = [line for line in lines if line.endswith(" before")]
    faults = sum("  failed rank  " in line for line in lines)
    assert int(before.split()[0]) + faults == 60


def test_the_domain_that_all_nodes_share_is_left_out(tmp_path: Path) -> None:
    lines = drawn(made(tmp_path / "run", long_name, 4, 1), 100, 50)
    assert "cluster.example.org" not in "\n".join(lines)
    assert any(line.startswith("gpu-rack00-chassis02-node0002  training") for line in lines)
    assert any("controller gpu-rack00-chassis03-node0003 (epoch 12)" in line for line in lines)


@pytest.mark.parametrize(
    ("names", "domain"),
    [
        ((), ""),
        (("a.b.org",), ""),
        (("a.b.org", "c.b.org"), ".b.org"),
        (("x1.b.org", "y1.b.org"), ".b.org"),
        (("a.b.org", "c"), ""),
        (("a.b.org", "c.d.net"), ""),
        (("a.x.org", "b.y.org"), ".org"),
    ],
)
def test_domains(names: tuple[str, ...], domain: str) -> None:
    assert domain_of([NodeStatus(name, "training") for name in names]) == domain


def test_a_name_that_is_too_long_keeps_its_end(tmp_path: Path) -> None:
    lines = drawn(made(tmp_path / "run", lambda number: f"{'x' * 90}{number:04d}", 4, 1), 80, 23)
    assert sum("…" in line and "0002 " in line for line in lines) == 1


def test_echoes_are_no_events_of_their_own(tmp_path: Path) -> None:
    text = "\n".join(drawn(made(tmp_path / "run", plain_name, 4, 1), 160, 50))
    assert "uncorrectable ECC" in text and "connection reset" not in text


@pytest.mark.parametrize("columns", [80, 60])
def test_status_in_a_real_terminal(tmp_path: Path, columns: int) -> None:
    made(tmp_path / "run", long_name, 40, 3, time.time())
    lines = shown(columns, "status", "run", cwd=tmp_path)
    assert too_long(lines, columns) == []
    assert sum(line.startswith("gpu-rack") for line in lines) == 41
    assert sum("failed rank" in line for line in lines) == 6


@pytest.mark.parametrize(
    ("more", "stalled_s", "said"),
    [
        (("rank_failed", {"round": 50, "node": "n2", "rank": 16, "kind": "signal"}), None, "failed"),
        (("hang", {"round": 50, "nodes": ["n2"], "kind": "absent"}), 8.0, "stalled"),
        (("hang", {"round": 50, "nodes": ["n2"], "kind": "absent"}), None, "training"),  # it went on
    ],
)
def test_a_node_in_trouble_is_shown_as_such(
    tmp_path: Path, more: tuple[str, dict[str, object]], stalled_s: float | None, said: str
) -> None:
    path = made(tmp_path / "run", plain_name, 4, 0)
    Ledger(path / "ledger", "2-n3-agent", clock=Ticks(NOW - 1)).append(more[0], **more[1])
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps({**status, "stalled_s": stalled_s}))
    lines = drawn(path, 80, 40)
    assert next(line.split()[1] for line in lines if line.startswith("n2 ")) == said
    later = Console(width=80, highlight=False)
    with later.capture() as captured:
        later.print(screen(RunReader(path).overview(NOW + 5), 40, 5, 80, internals=False, foot="q quit"))
    text = captured.get()
    assert "epoch" not in text and text.rstrip().endswith("q quit")
    assert next(line.split()[1] for line in text.splitlines() if line.startswith("n1 ")) == "silent"  # no news for 5 s
