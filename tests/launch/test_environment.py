"""Each node is looked at beside the start: what keeps ranks from running there, and in what nodes differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.environment import facts
from resilio_hpc.launch.environment.compare import NodeDifference, differences
from resilio_hpc.launch.process.helper_look import HelperLook
from resilio_hpc.launch.protocol import messages as m
from tests.support.environments import scrubbed
from tests.support.virtual_cluster.world import World
from tests.support.waiting import PATIENCE_S

GOOD = {"kernel": "6.1", "NVIDIA driver": "550.54.14"}


# -- what is gathered --------------------------------------------------------------------------------------------------


def test_a_script_and_data_that_are_there_keep_no_rank_from_running(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")  # a read of it would wait for ever
    paths = [str(tmp_path), str(tmp_path / "empty"), str(tmp_path / "pipe"), "/dev/null"]
    assert facts.missing(str(tmp_path / "train.py"), paths) == ("", [])


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    unfit, silent = facts.missing(str(tmp_path / "no.py"), [str(tmp_path / "no"), str(tmp_path)])
    assert unfit == (
        f"script {tmp_path}/no.py: No such file or directory; --data-path {tmp_path}/no: No such file or directory"
    )
    assert silent == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    assert "Permission denied" in facts.missing("", [str(tmp_path / "secret")])[0]


def test_a_path_that_does_not_answer_is_a_note_and_no_fault() -> None:
    found = facts.missing("", ["/hung"], 0.05, lambda path: time.sleep(PATIENCE_S))
    assert found == ("", ["--data-path /hung does not answer"])


def test_the_process_prints_what_is_missing_before_it_gathers_the_rest(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    asked = json.dumps({"script": str(script), "data_paths": [], "run_dir": str(tmp_path)})
    argv = [sys.executable, "-m", "resilio_hpc.launch.environment.facts", asked]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.splitlines()
    first, second = (json.loads(line) for line in said)
    assert first == {"unfit": ""}
    assert second["facts"]["kernel"] == os.uname().release
    assert len(second["facts"]["script"]) == 12
    script.write_text("pass  # another")
    assert facts.facts(str(script))["script"] != second["facts"]["script"]
    m.to_controller.decode(m.to_controller.encode(m.EnvironmentSeen("n1", 1, second["facts"])))


def test_a_look_that_hangs_ends_with_its_time_and_what_it_said_before_counts(tmp_path: Path) -> None:
    lines: list[bytes] = []
    program = "import time; print('{}', flush=True); time.sleep(1000)"
    now = [0.0]
    look = HelperLook([sys.executable, "-c", program], tmp_path / "log", 5.0, lines.append, lambda: now[0])
    until = time.monotonic() + PATIENCE_S
    while not lines and time.monotonic() < until:
        assert not look.over()
        time.sleep(0.01)
    now[0] = 6.0
    assert look.over()
    assert (lines, look.timed_out) == ([b"{}"], True)


# -- what is compared --------------------------------------------------------------------------------------------------


def test_the_odd_node_is_named_with_what_most_others_have() -> None:
    reports = {f"n{number}": dict(GOOD) for number in range(1, 6)}
    assert differences(reports) == []
    reports["n3"]["NVIDIA driver"] = "535.104.05"
    del reports["n5"]["kernel"]
    assert differences(reports) == [
        NodeDifference(("n3",), (("NVIDIA driver", "535.104.05", "550.54.14"),)),
        NodeDifference(("n5",), (("kernel", "none", "6.1"),)),
    ]


def test_nodes_that_differ_alike_are_one_line() -> None:
    reports = {f"n{number}": dict(GOOD) for number in range(40)}
    for number in range(18):
        reports[f"n{number}"]["kernel"] = "5.14"
    (one,) = differences(reports)
    assert len(one.nodes) == 18
    fields = {"nodes": list(one.nodes[:16]), "count": 18, "of": 40, "facts": {one.facts[0][0]: list(one.facts[0][1:])}}
    said = words("environment_differs", fields)
    assert said.endswith("and 2 more differ from 22 other nodes: kernel 5.14 (there: 6.1)")


def test_one_node_alone_differs_from_none() -> None:
    assert differences({"n1": GOOD}) == []


# -- what the controller makes of it -----------------------------------------------------------------------------------


def tell(world: World, node: str, **fields: Any) -> None:
    agent = world.agents[node]
    fields = {"facts": {}, **fields}
    agent.event(lambda: agent.core.ranks.reports.tell_of_node(m.EnvironmentSeen(node, 0, **fields)))


def members(world: World) -> list[str]:
    return [str(node) for node in world.records("round")[-1]["members"]]


def test_a_node_that_lacks_what_ranks_need_is_replaced_before_they_start() -> None:
    world = World(nodes=2, spares=1, slots=1)
    world.spawns = False  # its ranks wait for the answer
    world.run(lambda: world.starts != [] and bool(world.records("start")))
    assert members(world) == ["n1", "n2"]
    world.spawns = True
    tell(world, "n2", unfit="--data-path /data: No such file or directory")
    world.run(lambda: members(world) == ["n1", "n3"])
    world.until_step(5)
    assert [one["node"] for one in world.records("node_unfit")] == ["n2"]
    assert next(world.controllers()).run.restarts == 0
    tell(world, "n2")  # its file system is mounted now
    world.run(limit_s=1.0)
    assert not next(world.controllers()).run.unfit


def test_without_a_spare_the_run_ends_and_says_why() -> None:
    world = World(nodes=2, slots=1)
    world.spawns = False
    world.run(lambda: bool(world.records("start")))
    tell(world, "n2", unfit="script /home/me/train.py: No such file or directory")
    verdict = world.until_over()
    assert verdict["verdict"] == "not_enough_nodes"
    assert verdict["reason"].endswith("; n2: script /home/me/train.py: No such file or directory")


def test_ranks_that_run_are_left_alone_and_a_spare_goes_first_next_time() -> None:
    world = World(nodes=2, spares=1, slots=1)
    world.until_step(12)
    tell(world, "n2", unfit="--data-path /data: No such file or directory")
    world.run(limit_s=2.0)
    assert world.records("round")[-1]["round"] == 0
    world.fail_rank(0)
    world.until_round(1)
    assert members(world) == ["n1", "n3"]


def test_all_nodes_that_lose_their_data_later_go_on_where_they_are() -> None:
    world = World(nodes=2, slots=1)
    world.until_step(12)
    for node in ("n1", "n2"):
        tell(world, node, unfit="--data-path /data: No such file or directory", first=False)
    world.fail_rank(0)
    world.until_round(1)
    world.run(lambda: world.records("recovered") != [])
    assert members(world) == ["n1", "n2"]


def test_nodes_that_differ_are_told_once_and_again_to_a_later_controller() -> None:
    world = World(nodes=3, slots=1)
    world.until_step(5)
    for node in ("n1", "n2", "n3"):
        tell(world, node, facts=GOOD | ({"kernel": "5.14"} if node == "n2" else {}), notes=("/tmp has 3 MiB free",))
    tell(world, "n2", facts=GOOD | {"kernel": "5.14"}, notes=("/tmp has 3 MiB free",))
    world.run(lambda: world.records("environment_differs") != [])
    world.run(limit_s=5.0)
    (told,) = world.records("environment_differs")
    assert (told["nodes"], told["of"], told["facts"]) == (["n2"], 3, {"kernel": ["5.14", "6.1"]})
    assert sorted(one["node"] for one in world.records("environment_short")) == ["n1", "n2", "n3"]


# -- from end to end ---------------------------------------------------------------------------------------------------

SCRIPT = "from resilio_hpc import train\nrun = train.attach()\nfor step in run.steps(0, 3): pass\n"


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--run-dir", "run", *arguments]
    return subprocess.run(
        argv, cwd=folder, env=scrubbed(RESILIO_LOCAL_NODES="2"), capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.slow
def test_a_run_whose_data_is_there_trains_and_one_whose_data_is_not_says_so(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nnodes", "2", "--data-path", ".", "train.py")
    assert done.returncode == 0, done.stderr
    assert "takes no part" not in done.stderr
    kinds = {event.kind for event in read_ledger(tmp_path / "run" / "ledger")}
    assert not kinds & {"node_unfit", "environment_differs", "rank_failed"}
    (tmp_path / "other").mkdir()
    done = launch(tmp_path / "other", "--nnodes", "2", "--data-path", "none", "train.py")
    assert done.returncode == 1
    assert f"local1 takes no part: --data-path {tmp_path}/other/none: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
