"""Pair checks in jobs of a real Slurm: the faulty node is named, and the launcher leaves it out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.diagnose import CheckResult
from tests.support.environments import SUPPORT
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = "cpu_matrix = 128\ncpu_message_bytes = 65536\nblock_s = 0.02\nstart_s = 240\n"


def submitted(cluster: DevCluster, name: str, nodes: int, command: str) -> str:
    """The output of a batch job, once it has ended."""
    (cluster.shared / "pairs.toml").write_text(SETTINGS)
    job = cluster.submit(
        f"#!/bin/bash\nexport PYTHONPATH={ROOT} OMP_NUM_THREADS=1 RESILIO_PAIR_POLICY=/shared/pairs.toml\ncd /shared\n"
        f"{command} > /shared/{name}.out 2> /shared/{name}.err\necho $? > /shared/{name}.code\n",
        [f"--nodes={nodes}", "--no-kill", f"--output=/shared/{name}.txt"],
    )
    until(
        (cluster.shared / f"{name}.code").exists, "the end of the job",
        lambda: (cluster.job_state(job), (cluster.shared / f"{name}.err").read_text()), patience_s=900.0,
    )  # fmt: skip
    return (cluster.shared / f"{name}.out").read_text()


def told(result: CheckResult) -> list[object]:
    return [(one.node, one.state, one.evidence, one.compute_ratio, one.waited) for one in result.nodes]


@pytest.mark.parametrize("fault", [pytest.param("hang-collective", marks=pytest.mark.slow), "slow"])
def test_the_node_whose_probe_hangs_or_is_throttled_is_named(cluster: DevCluster, fault: str) -> None:
    script = SUPPORT / "diagnose" / "check_in_job.py"
    said = submitted(cluster, f"pairs-{fault}", 4, f"{sys.executable} {script} {fault}@n3")
    result = msgspec.json.decode(said, type=CheckResult)
    assert (result.bad, result.slow) == ((), ("n3",)) if fault == "slow" else (("n3",), ()), told(result)
    if fault != "slow":
        assert result.good == ("n1", "n2", "n4")


def test_the_command_and_the_launcher_leave_out_a_node_on_which_probes_are_killed(cluster: DevCluster) -> None:
    loop = "while [ ! -e /shared/no-more-kills ]; do pkill -KILL -f 'diagnose[.]prober'; sleep 0.1; done"
    killer = cluster.spawn("n2", ["sh", "-c", loop])
    resilio = f"{sys.executable} -m resilio_hpc.cli.main"
    (cluster.shared / "ranks.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
    )
    try:
        by_hand = f"{resilio} check-nodes --policy /shared/pairs.toml --exclude-file bad.txt --json"
        launch = f"{resilio} launch --check-nodes start --no-torch --nnodes 2:3 --run-dir /shared/checked ranks.py"
        said = submitted(cluster, "pairs-killed", 3, f"{by_hand} > by-hand.json; echo $? > by-hand.code; {launch}")
    finally:
        (cluster.shared / "no-more-kills").touch()
        killer.communicate(timeout=60)
    found = json.loads((cluster.shared / "by-hand.json").read_text())
    assert (found["outcome"], found["bad"], found["good"]) == ("found", "n2", "n1,n3")
    assert (cluster.shared / "by-hand.code").read_text().strip() == "1"
    assert (cluster.shared / "bad.txt").read_text() == "n2\n"
    assert sorted(said.splitlines()) == ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]
    (checked,) = [event for event in events_of(cluster.shared / "checked") if event.kind == "nodes_checked"]
    assert (checked.fields["bad"], checked.fields["left_out"]) == (["n2"], ["n2"])
    assert "n2 is bad" in (cluster.shared / "pairs-killed.err").read_text()
