"""With a real Slurm: learning from its reasons, weights, a drain at the threshold, and all of it back again; and the
next job of a chain, which avoids what failed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import resilio_hpc
from resilio_hpc.core.process import Completed
from resilio_hpc.devtools.demo.stage import events_of
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.drills.script import counting
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.reason import Finding, read_reason, write_reason
from resilio_hpc.slurm.node_faults.fault import NodeFault
from resilio_hpc.slurm.node_faults.ledger import FaultLedger
from tests.support.clusters import each_series
from tests.support.waiting import until

PACKAGE = {"PYTHONPATH": str(Path(resilio_hpc.__file__).parents[1])}
pytestmark = each_series(HOST_SERIES, slow=[NEWEST_SERIES])


def nodes(cluster: DevCluster) -> dict[str, Node]:
    client = CommandClient(lambda argv, timeout_s, extra: cluster.run("ctl", argv, timeout_s, env=extra))
    return {node.name: node for node in client.nodes()}


def command(cluster: DevCluster, *argv: str) -> Completed:
    program = [sys.executable, "-m", "resilio_hpc.cli.main", *argv]
    return cluster.run("ctl", program, 180.0, env=PACKAGE, check=False)


def apply(cluster: DevCluster, *argv: str) -> tuple[dict[str, str], int]:
    """What was told of each node, and the exit code."""
    done = command(cluster, "nodes", "apply", "--ledger=/shared/faults", "--audit=/shared/audit.jsonl", "--json", *argv)
    assert done.returncode in (0, 3), done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {f"{one['node']} {one['act']}": one["result"] for one in told}, done.returncode


def failed(cluster: DevCluster, node: str, times: int) -> None:
    """So many runs have lost the node, the last one two minutes ago."""
    last = time.time() - 120
    ledger = FaultLedger(cluster.shared / "faults")
    ledger.append(NodeFault(time=last - 700 * n, node=node, kind="node-lost", run=f"{node}-{n}") for n in range(times))


def test_weight_and_drain_follow_the_score_and_are_given_back(cluster: DevCluster) -> None:
    assert apply(cluster) == ({}, 0)
    failed(cluster, "n1", 1)
    failed(cluster, "n2", 5)
    assert apply(cluster, "--dry-run")[0]["n2 drain"] == "would-act"
    assert {node.weight for node in nodes(cluster).values()} == {1}
    told, code = apply(cluster)
    assert (told, code) == ({"n1 weight": "set", "n2 weight": "set", "n2 drain": "drained"}, 0)
    now = nodes(cluster)
    assert [now[name].weight for name in ("n1", "n2", "n3")] == [1001, 10001, 1]
    (held,) = read_reason(now["n2"].reason) or ()
    assert held.check == "node-faults" and "node-lost 5" in held.evidence
    assert cluster.run("ctl", ["srun", "--nodes=1", "hostname"]).stdout.strip() not in ("n1", "n2")
    assert cluster.run("ctl", ["srun", "--nodes=4", "hostname"]).stdout.split() != []  # n1 comes last, and does come
    assert apply(cluster)[0] == {}

    quick = cluster.shared / "quick.toml"
    quick.write_text("half_life_days = 0.0001\n")  # 9 s: all of it is long ago
    assert apply(cluster, "--policy=/shared/quick.toml")[0] == {
        "n1 weight": "restored", "n2 weight": "restored", "n2 drain": "undrained",
    }  # fmt: skip
    assert {(node.weight, node.state.drain) for node in nodes(cluster).values()} == {(1, False)}

    assert apply(cluster)[0]["n2 drain"] == "drained"
    assert command(cluster, "nodes", "forget", "--ledger=/shared/faults", "n[1-2]", "--why=new boards").returncode == 0
    assert set(apply(cluster)[0].values()) == {"restored", "undrained"}
    assert {(node.weight, node.state.drain) for node in nodes(cluster).values()} == {(1, False)}
    results = [json.loads(line)["result"] for line in (cluster.shared / "audit.jsonl").read_text().splitlines()]
    assert results.count("drained") == 2 and results.count("undrained") == 2


def test_an_administrators_weight_and_drain_stay(cluster: DevCluster) -> None:
    assert apply(cluster) == ({}, 0)
    cluster.run("ctl", ["scontrol", "update", "NodeName=n3", "Weight=77"])
    cluster.run("ctl", ["scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=bob: disk"])
    failed(cluster, "n3", 1)
    failed(cluster, "n4", 5)
    told, code = apply(cluster)
    assert (told, code) == ({"n3 weight": "left", "n4 weight": "set", "n4 drain": "left"}, 3)
    cluster.run("ctl", ["scontrol", "update", "NodeName=n4", "Weight=5"])  # after us
    command(cluster, "nodes", "forget", "--ledger=/shared/faults", "n3", "n4", "--why=looked")
    assert apply(cluster) == ({}, 0)
    now = nodes(cluster)
    assert [(now[name].weight, now[name].reason) for name in ("n3", "n4")] == [(77, ""), (5, "bob: disk")]


def test_drains_of_health_checks_and_lost_nodes_are_learnt_from_slurm(cluster: DevCluster) -> None:
    reason = write_reason([Finding("gpu-xid", "Xid 79 on GPU 3")])
    cluster.run("ctl", ["scontrol", "update", "NodeName=n5", "State=DRAIN", f"Reason={reason}"])
    cluster.machines.crash("n3")
    until(lambda: nodes(cluster)["n3"].state.base == "DOWN", "n3 is DOWN")
    apply(cluster)
    cluster.run("ctl", ["scontrol", "update", "NodeName=n5", "State=RESUME"])
    assert apply(cluster)[0] == {}  # seen once, kept, and not seen twice
    listed = json.loads(command(cluster, "nodes", "list", "--ledger=/shared/faults", "--json", "n3", "n5").stdout)
    newest = {one["node"]: one["faults"][0] for one in listed}
    assert [newest[name]["kind"] for name in ("n3", "n5")] == ["node-down", "health-fatal"]
    assert (newest["n5"]["check"], newest["n5"]["evidence"]) == ("gpu-xid", "Xid 79 on GPU 3")
    assert nodes(cluster)["n5"].weight == 1001


def test_a_submitted_job_avoids_bad_nodes_beside_the_users_own_unless_all_are_needed(cluster: DevCluster) -> None:
    ledger = FaultLedger(cluster.shared / "mine")
    ledger.append([NodeFault(time=time.time(), node="n2", kind="node-lost", run="r")])
    env = {**PACKAGE, "RESILIO_NODE_FAULTS": "/shared/mine"}

    def submit(*words: str) -> tuple[str, str]:
        argv = ["submit", "--template=multi-node", "--no-check", "gpus_per_node=0", *words, "--", "train.py"]
        program = [sys.executable, "-m", "resilio_hpc.cli.main", *argv]
        done = cluster.run("ctl", program, 180.0, env=env, cwd="/shared", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    script, note = submit("nodes=2", "exclude=n5", "--dry-run")
    assert "#SBATCH --exclude=n5,n2\n" in script, note
    assert "n2 avoided (--any-node: not): n2: score 1.00: node-lost 1" in note
    script, note = submit("nodes=5", "--dry-run")
    assert "--exclude" not in script and "n2 not avoided: of 5 nodes that would do" in note
    script, note = submit("nodes=2", "--any-node", "--dry-run")
    assert "--exclude" not in script and note == ""
    receipt, _ = submit("nodes=2", "hold=true", "--json")
    fields = cluster.run("ctl", ["scontrol", "-o", "show", "job", json.loads(receipt)["job"]]).stdout
    assert "ExcNodeList=n2 " in fields
    done = cluster.run("ctl", [sys.executable, "-m", "resilio_hpc.cli.main", "nodes", "exclude", "--nodes=4"], env=env)
    assert done.stdout == "n2\n"


def test_the_next_job_of_a_chain_avoids_the_node_that_was_lost_and_the_users_own_list_stays(
    cluster: DevCluster,
) -> None:
    launcher = Path(sys.executable).with_name("resilio-launch")
    script = cluster.shared / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --no-kill --time=30 --output=/shared/avoids.%j.txt\n"
        f"exec {launcher} --no-torch --chain --nnodes=2 --run-dir=/shared/runs/one {Path(counting.__file__).resolve()} "
        "--without-torch --steps=2000 --result=/shared/avoids.result\n"
    )
    options = ["--parsable", "--exclusive", "--exclude=n5", "/shared/job.sh"]
    first = cluster.run("ctl", ["sbatch", *options], env=PACKAGE).stdout.strip()
    run = cluster.shared / "runs" / "one"

    def said() -> str:
        texts = [file.read_text()[-3000:] for file in sorted(cluster.shared.glob("avoids.*.txt"))]
        return "\n".join([*texts, cluster.run("ctl", ["squeue"], check=False).stdout])

    def found(kind: str) -> list[dict[str, object]]:
        return [event.fields for event in events_of(run) if event.kind == kind]

    until(lambda: found("committed"), "a committed step", said)
    (here,) = [fields["nodes"] for fields in found("launch")]
    assert isinstance(here, list)
    cluster.machines.crash(here[1])
    until(lambda: found("excludes"), "an exclusion", said)
    (told,) = found("excludes")
    assert told["nodes"] == [here[1]] and f"{here[1]}: score 1" in str(told["why"])
    successor = str(told["job"])
    fields = cluster.run("ctl", ["scontrol", "-o", "show", "job", successor]).stdout
    assert f"ExcNodeList={here[1]},n5" in fields and successor != first
    kept = FaultLedger(cluster.shared / "runs" / "resilio-node-faults-0").read().faults
    assert [(fault.node, fault.kind, fault.job) for fault in kept] == [(here[1], "node-lost", first)]
