"""The client and the drains with real Slurms: what is read both ways, what is written, and what when nobody answers."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from resilio_hpc.core.process import Completed
from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES, NEWEST_SERIES
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.model import Job, Node
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import Finding, read_reason, write_reason
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.clusters import MIDDLE_SERIES, each_series
from tests.support.waiting import PATIENCE_S, until

XID = Finding("gpu.xid", "Xid 79 on GPU 3")
POLICY = DrainPolicy(share=0.5, at_least=2, window_s=600, passes=3)
pytestmark = each_series(HOST_SERIES, NEWEST_SERIES, slow=MIDDLE_SERIES)


def runner(cluster: DevCluster) -> Callable[[Sequence[str], float, Mapping[str, str]], Completed]:
    def run(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        return cluster.run("ctl", argv, timeout_s, env=extra)

    return run


def client(cluster: DevCluster, **options: Any) -> CommandClient:
    return CommandClient(runner(cluster), **options)


def writer(cluster: DevCluster, run: Any = None) -> DrainWriter:
    return DrainWriter(CommandClient(run or runner(cluster)), POLICY, AuditLog(None))


def admin(cluster: DevCluster, *words: str) -> None:
    cluster.run("ctl", ["scontrol", "update", *words])


def one(cluster: DevCluster, name: str) -> Node:
    (node,) = client(cluster).nodes([name])
    return node


def both_ways(cluster: DevCluster, question: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The same records from JSON and from tables, asked for until nothing moved in between."""
    for _ in range(20):
        answers = [{record_key(record): record for record in getattr(client(cluster, use_json=way), question)()}
                   for way in (True, False, True)]  # fmt: skip
        if answers[0] == answers[2]:
            return answers[0], answers[1]
        time.sleep(0.3)
    raise AssertionError("the cluster does not come to rest")


def record_key(record: Node | Job) -> str | int:
    return record.name if isinstance(record, Node) else record.id


def test_nodes_and_jobs_are_the_same_from_json_and_from_tables(cluster: DevCluster) -> None:
    hostile = "bob State=IDLE | Comment=x [eve@2020-01-01T00:00:00] é"
    admin(cluster, "NodeName=n1", "State=DRAIN", f"Reason={hostile}", "Comment=a  Reason=b")
    admin(cluster, "NodeName=n2", "Weight=7", "AvailableFeatures=a,b", "ActiveFeatures=a")
    running = cluster.submit("#!/bin/sh\nsleep 100\n", ["-w", "n3", "--gres=gpu:2", "--comment", '{"k":1}'])
    forged = "x\nJobState=FAILED\n99|COMPLETED|None"
    waiting = cluster.submit("#!/bin/sh\n", ["--begin=now+1hour", "-a", "1-3%1", "-J", forged, "--comment", forged])
    held = cluster.submit("#!/bin/sh\nsleep 100\n")
    cluster.run("ctl", ["srun", "-n1", "true"])  # one without a batch script
    for number in (running, held):
        cluster.wait_for_job(number, ["RUNNING"], 20.0)
    cluster.run("ctl", ["scontrol", "requeuehold", str(held)])
    cluster.wait_for_job(held, ["PENDING"], 20.0)
    cluster.run("ctl", ["scancel", str(held)])
    cluster.wait_for_job(held, ["CANCELLED"], 20.0)

    from_json, from_table = both_ways(cluster, "nodes")
    assert set(from_json) == {"n1", "n2", "n3", "n4", "n5"}
    assert from_json == from_table
    assert (from_json["n1"].reason, from_json["n1"].reason_by, from_json["n1"].comment) == (
        hostile, "root", "a  Reason=b",
    )  # fmt: skip
    assert abs((from_json["n1"].reason_time or 0) - time.time()) < 120
    assert (from_json["n2"].weight, from_json["n2"].features, from_json["n2"].active_features) == (
        7,
        ("a", "b"),
        ("a",),
    )
    assert set(from_json["n2"].partitions) - set(from_json["n4"].partitions) == {"pair", "trio"}
    assert [gres.count for gres in from_json["n3"].gres_used] == [2]
    assert from_json["n3"].cpus_allocated == 1

    jobs, table_jobs = both_ways(cluster, "jobs")
    assert jobs == table_jobs
    assert jobs[held].reason == "job requeued in held state"
    assert (jobs[running].nodes, jobs[running].comment, str(jobs[running].state)) == (("n3",), '{"k":1}', "RUNNING")
    assert (jobs[waiting].name, jobs[waiting].comment, jobs[waiting].array_tasks) == (forged, forged, "1-3%1")
    assert 99 not in jobs
    for way in (True, False):
        asked = client(cluster, use_json=way)
        assert [job.id for job in asked.jobs([str(running)])] == [running]
        assert asked.jobs(["99999"]) == asked.nodes(["nosuch"]) == ()
        assert [node.name for node in asked.nodes(["n3", "nosuch"])] == ["n3"]


def test_partitions(cluster: DevCluster) -> None:
    found = {one.name: one for one in client(cluster).partitions()}
    main, pair = found["main"], found["pair"]
    assert (main.default, main.nodes, main.max_time_s) == (True, ("n1", "n2", "n3", "n4", "n5"), 86400)
    assert (pair.default, pair.nodes, pair.max_time_s) == (False, ("n2", "n3"), 3600)
    assert (pair.priority_tier, pair.total_cpus, pair.state) == (2, 16, "UP")


def test_a_lost_node_is_read_the_same_both_ways(cluster: DevCluster) -> None:
    cluster.machines.crash("n4")
    cluster.wait_for_node("n4", ("down", "down*"), timeout_s=40)
    from_json, from_table = both_ways(cluster, "nodes")
    assert from_json["n4"].state.base == from_table["n4"].state.base == "DOWN"
    assert not from_json["n4"].state.in_service
    assert from_json["n4"].reason == from_table["n4"].reason == "Not responding"
    assert writer(cluster).drain("n4", XID).result == "drained"  # Slurm withdraws its reason itself, so ours may stand
    cluster.machines.boot("n4")
    until(lambda: one(cluster, "n4").state.base == "IDLE", "n4 is back", lambda: one(cluster, "n4"))
    assert (str(one(cluster, "n4").state), read_reason(one(cluster, "n4").reason)) == ("IDLE+DRAIN", (XID,))


def test_draining_with_manners(cluster: DevCluster) -> None:
    drainer = writer(cluster)
    assert drainer.drain("n1", XID).result == "drained"
    assert read_reason(one(cluster, "n1").reason) == (XID,)
    assert drainer.drain("n1", Finding("ib.link", "down")).result == "reworded"
    assert drainer.undrain("n1", "gpu.xid").result == "reworded"
    assert one(cluster, "n1").state.drain
    assert drainer.undrain("n1").result == "undrained"
    assert one(cluster, "n1").state.in_service

    admin(cluster, "NodeName=n2", "State=DRAIN", "Reason=bob: disk")
    assert drainer.drain("n2", XID).result == drainer.undrain("n2").result == "left"
    assert one(cluster, "n2").reason == "bob: disk"

    assert drainer.drain("n3", XID).result == "drained"
    admin(cluster, "NodeName=n3", f"Reason={one(cluster, 'n3').reason} - mine, bob")
    assert drainer.undrain("n3").result == "left"
    admin(cluster, "NodeName=n4", "State=DRAIN", "Reason=Kill task failed")
    assert drainer.recheck("n4", passes=3).result == "offered"
    assert drainer.resume_slurms_own("n4").result == "undrained"


def test_an_order_between_our_look_and_our_write_is_noticed(cluster: DevCluster) -> None:
    plain = runner(cluster)

    def with_bob(argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        if list(argv[:2]) == ["scontrol", "update"] and "bob" not in done:
            done.append("bob")
            admin(cluster, "NodeName=n1", "State=DRAIN", "Reason=bob")
        return plain(argv, timeout_s, extra)

    done: list[str] = []
    assert writer(cluster, with_bob).drain("n1", XID).result == "contested"
    node = one(cluster, "n1")
    assert (node.state.drain, read_reason(node.reason)) == (True, None)
    admin(cluster, "NodeName=n1", "State=RESUME")
    assert writer(cluster).drain("n1", XID).result == "drained"
    done.clear()
    assert writer(cluster, with_bob).undrain("n1").result == "contested"
    node = one(cluster, "n1")
    assert (node.state.drain, read_reason(node.reason)) == (True, None)


def test_random_meetings_with_an_administrator(cluster: DevCluster) -> None:
    draw = random.Random(7)
    held: dict[str, str] = {}
    drainer = writer(cluster)
    ours = 0
    for turn in range(24):
        name = draw.choice(["n1", "n2"])
        act = draw.choice(["drain", "undrain", "admin drains", "admin resumes"])
        if act == "drain":
            ours += drainer.drain(name, XID).result == "drained"
        elif act == "undrain":
            drainer.undrain(name)
        elif act == "admin drains":
            held[name] = f"bob: {turn}"
            admin(cluster, f"NodeName={name}", "State=DRAIN", f"Reason={held[name]}")
        elif one(cluster, name).state.drain:
            held.pop(name, None)
            admin(cluster, f"NodeName={name}", "State=RESUME")
        for node in client(cluster).nodes(["n1", "n2"]):
            if node.name in held:
                assert (node.state.drain, node.reason) == (True, held[node.name]), (turn, act)
    assert ours


def test_a_storm_stops_draining(cluster: DevCluster) -> None:
    results = [writer(cluster).drain(name, XID).result for name in cluster.nodes[:4]]
    assert results == ["drained", "storm", "drained", "storm"] or results == ["drained", "drained", "storm", "storm"]
    assert sum(node.state.drain for node in client(cluster).nodes()) == 2


def test_a_check_holds_a_few_nodes_and_other_checks_go_on(cluster: DevCluster) -> None:
    policy = DrainPolicy(share=1.0, at_least=2, window_s=600, passes=3, check_share=0.1)
    drainer = DrainWriter(client(cluster), policy, AuditLog(None))
    for name in ("n1", "n2", "n3"):  # three nodes, each of which looked before the next one wrote
        admin(cluster, f"NodeName={name}", "State=DRAIN", f"Reason={write_reason([XID])}")
    order = sorted(client(cluster).nodes(["n1", "n2", "n3"]), key=lambda node: (node.reason_time or 0, node.name))
    results = {node.name: drainer.drain(node.name, XID).result for node in order}
    assert list(results.values()) == ["nothing", "nothing", "shared"]
    assert [node.state.drain for node in order] == [True] * 3
    assert sorted(node.name for node in client(cluster).nodes() if node.state.drain) == sorted(list(results)[:2])
    assert drainer.drain("n4", XID).result == "shared"
    assert drainer.drain("n4", Finding("disk-errors", "sdb")).result == "drained"


def test_jobs_through_the_client(cluster: DevCluster) -> None:
    slurm = client(cluster)
    job_id = cluster.submit("#!/bin/sh\nsleep 600\n", ["--nodes=2", "--begin=now+1hour"])
    number = str(job_id)
    slurm.orders.update_job(number, {"NumNodes": "1", "TimeLimit": "17", "Comment": 'phase="two" of 3'})
    (job,) = slurm.jobs([number])
    assert (job.node_count, job.time_limit_s, job.comment, str(job.state)) == (
        1,
        17 * 60,
        'phase="two" of 3',
        "PENDING",
    )
    slurm.orders.update_job(number, {"StartTime": "now"})
    cluster.wait_for_job(job_id, ["RUNNING"], 20.0)
    cluster.run("ctl", ["scontrol", "requeue", number])
    cluster.wait_for_job(job_id, ["PENDING", "RUNNING"], 20.0)
    until(lambda: slurm.jobs([number])[0].restarts == 1, "it starts once more", lambda: slurm.jobs([number]))
    cluster.run("ctl", ["scancel", number])
    cluster.wait_for_job(job_id, ["CANCELLED"], 20.0)
    assert slurm.jobs([number])[0].state.ended


def test_without_slurmctld_every_call_ends_and_says_so(cluster: DevCluster) -> None:
    """All at once: each waits for its limit, since Slurm's own retries take minutes."""
    cluster.machines.kill_slurmctld()
    json_way, table_way = (client(cluster, use_json=way, timeout_s=10.0) for way in (True, False))
    calls: list[Callable[[], object]] = [
        json_way.nodes, json_way.jobs, json_way.partitions, table_way.nodes, table_way.jobs,
        partial(json_way.orders.drain, ["n1"], "x"), partial(json_way.orders.update_job, "1", {"Comment": "x"}),
    ]  # fmt: skip
    with ThreadPoolExecutor(len(calls) + 1) as pool:
        asked = [pool.submit(call) for call in calls]
        drained = pool.submit(writer(cluster).drain, "n1", XID)
        assert [type(one.exception(timeout=PATIENCE_S)) for one in asked] == [Unanswered] * len(calls)
        outcome = drained.result(timeout=PATIENCE_S)
    assert (outcome.result, outcome.unanswered) == ("unknown", True)


def resilio(cluster: DevCluster, *words: str) -> Completed:
    project = Path(__file__).resolve().parent.parent.parent
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", *words]
    return cluster.run("ctl", argv, 60.0, check=False, env={"PYTHONPATH": str(project)})


def test_the_commands(cluster: DevCluster) -> None:
    log = cluster.shared / "drain.jsonl"
    log.unlink(missing_ok=True)
    dry = resilio(cluster, "drain", "n1", "--reason", "fan", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "n1: would-act: drain: is IDLE\n")
    audit = ["--audit", "/shared/drain.jsonl"]
    seen = resilio(cluster, "drain", "n1", "--reason", "fan", "--observe", *audit)
    assert (seen.returncode, seen.stdout) == (0, dry.stdout)
    assert one(cluster, "n1").state.in_service
    done = resilio(cluster, "drain", "n1", "--reason", "fan is loud", "--json", *audit)
    assert (done.returncode, json.loads(done.stdout)["result"]) == (0, "drained")
    admin(cluster, "NodeName=n2", "State=DRAIN", "Reason=bob: disk")
    ended = resilio(cluster, "undrain", "n[1-2]", *audit)
    assert ended.returncode == 3
    assert [line.split(": ")[:2] for line in ended.stdout.splitlines()] == [["n1", "undrained"], ["n2", "left"]]
    assert [json.loads(line)["result"] for line in log.read_text().splitlines()] == [
        "would-act", "drain", "drained", "undrain", "undrained", "left",
    ]  # fmt: skip
    wrong = resilio(cluster, "drain", "ALL", "--reason", "x", *audit)
    assert (wrong.returncode, wrong.stderr) == (2, "resilio: error: not the name of a node: 'ALL'\n")
