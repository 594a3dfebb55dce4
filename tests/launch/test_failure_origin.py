"""What the console shows of a failure: its origin, and its echoes as a number. Real ranks, connected by sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.config.mode import Mode
from tests.support.environments import scrubbed
from tests.support.virtual_cluster.world import World
from tests.support.waiting import PATIENCE_S

# Every rank but the origin waits for a byte of rank 0, whose connections the origin's end closes.
RING = """
import ctypes, os, signal, socket, sys, threading, time
rank, world, how = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("rank", rank, "is up", flush=True)
if not first:
    sys.exit(0)
place = "\\0" + os.environ["TORCHELASTIC_RUN_ID"] + os.environ["MASTER_PORT"]
if rank == 1:
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    peers = [server.accept()[0] for _ in range(world - 1)]
    for peer in peers:
        peer.recv(1)
    print("before the end", flush=True)
    if how == "slow":  # its connections break at once, and its process ends after those of its peers
        threading.Thread(target=time.sleep, args=(60,)).start()
        for peer in peers:
            peer.close()
    if how in ("raise", "slow"):
        raise RuntimeError("no such data set")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)
    if how == "two":
        peers[0].send(b"x")
        raise ValueError("shard 1 is empty")
    for peer in peers:
        peer.send(b"x")
    time.sleep(60)
peer = socket.socket(socket.AF_UNIX)
while True:
    try:
        peer.connect(place)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
peer.send(b"x")
answer = peer.recv(1)
if how == "two" and answer:
    raise ValueError("another shard is empty")
if how == "timeout":
    raise TimeoutError("Timed out waiting 5000ms for recv operation")
raise ConnectionError("Connection closed by peer")
"""
GLOO = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(3):
    if first and step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000))
print("done", flush=True)
"""
LINES = [line.strip() for line in RING.splitlines()]
LAUNCH = (sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--run-dir", "run")


def launch(folder: Path, *arguments: str, nodes: int = 1) -> subprocess.CompletedProcess[str]:
    (folder / "ring.py").write_text(RING)
    return subprocess.run(
        [*LAUNCH, "--failure-grace", "1", *arguments], cwd=folder, env=scrubbed(RESILIO_LOCAL_NODES=str(nodes)),
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event.fields for event in read_ledger(folder / "run" / "ledger") if event.kind == kind]


def place(line: str) -> str:
    return f"ring.py:{LINES.index(line) + 1}"


def logged(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "run" / "logs" / "0").rglob("*.log")))


@pytest.mark.parametrize(
    ("how", "origin"),
    [
        ("raise", "ended with exit code 1 at PLACE: RuntimeError: no such data set"),
        pytest.param("kill", "killed by SIGKILL", marks=pytest.mark.slow),
        ("crash", "killed by SIGSEGV"),
    ],
)
def test_the_origin_is_shown_and_its_echoes_are_counted(tmp_path: Path, how: str, origin: str) -> None:
    done = launch(tmp_path, "--nproc-per-node", "4", "ring.py", how)
    node = entries(tmp_path, "launch")[0]["nodes"][0]
    assert done.returncode == 0, done.stderr
    origin = origin.replace("PLACE", place('raise RuntimeError("no such data set")'))
    assert done.stderr.count(f"rank 1 on {node} {origin}") == 1
    assert "ConnectionError" not in done.stdout + done.stderr
    assert done.stdout.count("Traceback") == (how == "raise")
    assert done.stdout.count("before the end") == 1
    folded = logged(tmp_path).count("ConnectionError: Connection closed by peer")
    told = [entry["count"] for entry in entries(tmp_path, "echoes")]
    assert sum(told) >= folded, "a peer may be killed before it has printed what it recorded"
    if told:
        assert f"{told[0]} peer" in done.stderr
        assert f"lost the connection to rank 1 on {node}; tracebacks: " in done.stderr


@pytest.mark.slow
def test_a_second_failure_of_its_own_is_shown(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc-per-node", "4", "--failure-grace", "2", "ring.py", "two")
    assert done.returncode == 0, done.stderr
    shown = [text for text in ("shard 1 is empty", "another shard is empty") if f"ValueError: {text}" in done.stdout]
    logs = logged(tmp_path)
    assert shown == [text for text in ("shard 1 is empty", "another shard is empty") if f"ValueError: {text}" in logs]
    assert "ConnectionError" not in done.stdout


def test_where_all_time_out_one_traceback_is_shown(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc-per-node", "4", "ring.py", "timeout")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Traceback") == 1
    (first,) = entries(tmp_path, "first_failure")
    there = place('raise TimeoutError("Timed out waiting 5000ms for recv operation")')
    assert (first["place"], first["echo"]) == (there, True)
    assert done.stderr.count(f"rank {first['rank']} on {first['node']} ended with exit code 1 at {there}: Time") == 1


def test_echoes_of_other_nodes_are_counted_with_those_here(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc-per-node", "2", "ring.py", "raise", nodes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Traceback") == 1
    assert len(entries(tmp_path, "echoes")) <= 1


def test_a_run_that_ends_names_the_origin_and_counts_the_echoes(tmp_path: Path) -> None:
    done = launch(tmp_path, "--mode", "observe", "--nproc-per-node", "4", "ring.py", "raise")
    assert done.returncode == 1
    assert done.stdout.count("Traceback") == 1
    assert done.stderr.count("RuntimeError: no such data set") == 2  # as it happens, and in the last words
    echoes = sum(entry.get("echoes", 0) for entry in entries(tmp_path, "agent_ends"))
    assert (f"{echoes} peer" in done.stderr) == (echoes > 0)


@pytest.mark.parametrize("mode", ["observe", "recover"])
def test_an_origin_that_takes_long_to_end_is_named_though_its_echoes_end_first(tmp_path: Path, mode: str) -> None:
    done = launch(tmp_path, "--mode", mode, "--nproc-per-node", "4", "ring.py", "slow")
    assert done.returncode == (mode == "observe"), done.stderr
    assert done.stdout.count("Traceback") == 1
    assert "ConnectionError" not in done.stdout + done.stderr
    failed = [entry for entry in entries(tmp_path, "rank_failed") if not entry.get("echo")]
    assert [(entry["rank"], entry["message"]) for entry in failed] == [(1, "RuntimeError: no such data set")]


@pytest.mark.slow
def test_echoes_are_shown_on_demand(tmp_path: Path) -> None:
    done = launch(tmp_path, "--echoes", "show", "--nproc-per-node", "4", "ring.py", "kill")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Traceback") == logged(tmp_path).count("Traceback")


@pytest.mark.slow
def test_torchs_own_tracebacks_of_a_lost_connection_are_folded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "gloo.py").write_text(GLOO)
    command = [word for word in LAUNCH if word != "--no-torch"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "4", "--failure-grace", "2", "gloo.py"], cwd=tmp_path,
        env=scrubbed(RESILIO_LOCAL_NODES="1"), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 4
    assert "Traceback" not in done.stdout + done.stderr
    assert "killed by SIGKILL" in done.stderr
    folded = logged(tmp_path).count("RuntimeError: ")
    assert sum(entry["count"] for entry in entries(tmp_path, "echoes")) >= folded


def test_a_mode_that_ends_the_run_waits_for_the_failure_behind_an_echo() -> None:
    world = World(nodes=3, mode=Mode.OBSERVE)
    world.until_step(12)
    world.fail_rank(2, exit_code=1, signal=None, message="RuntimeError: Connection closed by peer")
    world.run(limit_s=0.5)
    assert world.records("rank_failed") != []
    world.fail_rank(0, signal=11)
    assert world.until_over()["first_failure"]["rank"] == 0


def test_every_node_hears_the_cause_with_the_next_start() -> None:
    world = World(nodes=3)
    world.until_step(12)
    world.fail_rank(2, exit_code=1, signal=None, message="RuntimeError: Connection closed by peer")
    world.fail_rank(0, signal=11)
    world.run(lambda: world.records("recovered") != [])
    causes = {agent.judged[-1] for agent in world.agents.values() if agent.judged}
    assert [(cause.node, cause.rank) for cause in causes if cause] == [("n1", 0)]
    (echoes,) = world.records("echoes")
    assert (echoes["rank"], echoes["count"], echoes["round"]) == (0, 1, 0)
