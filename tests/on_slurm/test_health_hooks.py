"""The hooks on a real Slurm: jobs start, go elsewhere, or are cleaned up after, whatever hangs or is full."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.devtools.devcluster import DevCluster
from resilio_hpc.prolog_epilog.hooks.hook_files import UNIT, package_folder
from tests.support.environments import ROOT
from tests.support.waiting import until

RUN = "/run/resilio/health"
HAPPENS = "what the hooks should bring about"
BATCH = ["--chdir=/tmp", "--output=/dev/null", "--nodes=1"]


def hooks_of(cluster: DevCluster) -> Path:
    (line,) = [line for line in cluster.spec.conf if line.startswith("HealthCheckProgram=")]
    return Path(line.partition("=")[2]).parent


def node_file(cluster: DevCluster, node: str, name: str) -> str:
    return cluster.run(node, ["cat", f"{RUN}/{name}"], check=False, cwd="/").stdout


def verdict(cluster: DevCluster, node: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(node_file(cluster, node, "verdict.json"))
    except ValueError:
        return {}
    return found


def look_anew(cluster: DevCluster, node: str) -> dict[str, Any]:
    """Run the health check as slurmd does, with nothing but the node's name, and wait for its verdict."""
    before = verdict(cluster, node).get("uptime_s", 0.0)
    cluster.run(node, ["touch", f"{RUN}/wanted"], check=False, cwd="/")

    def fresh() -> bool:
        cluster.run(node, ["env", "-i", f"SLURMD_NODENAME={node}", str(hooks_of(cluster) / "health_check")], cwd="/")
        return bool(verdict(cluster, node).get("uptime_s", 0.0) > before)

    until(fresh, HAPPENS)
    return verdict(cluster, node)


def results(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["check"]: result for result in found["results"]}


@pytest.fixture
def healthy(guarded: DevCluster) -> Iterator[DevCluster]:
    """Both nodes with a verdict that lets jobs start; repaired afterwards."""
    for node in guarded.nodes:
        look_anew(guarded, node)
    yield guarded
    guarded.machines.release_shared()
    guarded.run("ctl", ["scancel", "--user=root"], check=False)
    for node in guarded.nodes:
        guarded.run(node, ["sh", "-c", f"umount -l /var/tmp; umount -l {RUN}; true"], cwd="/")
        guarded.run("ctl", ["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
    guarded.wait_for_idle(timeout_s=60.0)


def test_the_health_check_needs_no_path_and_jobs_start(guarded: DevCluster) -> None:
    assert guarded.run("ctl", ["srun", "--nodes=2", "hostname"]).stdout.split() != []  # with or without a verdict
    for node in guarded.nodes:
        found = look_anew(guarded, node)
        assert found["node"] == node
        assert results(found)["disk-space"]["status"] == "pass"
        assert results(found)["slurm-conf"]["status"] == "pass"
    assert len(guarded.run("ctl", ["srun", "--nodes=2", "hostname"]).stdout.split()) == 2


FILL = "mount -t tmpfs -o size=1m tmpfs /var/tmp && dd if=/dev/zero of=/var/tmp/full bs=64k 2>/dev/null; true"


def test_without_the_daemon_no_prolog_drains_a_node_past_the_storm_breaker(healthy: DevCluster) -> None:
    healthy.run("n1", ["sh", "-c", FILL], cwd="/")
    fault = results(look_anew(healthy, "n1"))["disk-space"]["faults"][0]
    assert fault["device"] == "/var/tmp"
    job = healthy.submit("#!/bin/sh\ntrue\n", [*BATCH, "--nodelist=n1"])
    until(lambda: healthy.job_state(job) == "COMPLETED", HAPPENS)
    assert "drain" not in healthy.node_states()["n1"]
    log = node_file(healthy, "n1", "log")
    assert "passes, without leave of the storm breaker" in log and "drain disk-space: /var/tmp has 0.0 %" in log


def test_with_leave_a_full_disk_sends_the_job_elsewhere(healthy: DevCluster) -> None:
    healthy.run("n1", ["sh", "-c", FILL], cwd="/")
    look_anew(healthy, "n1")
    up = int(float(healthy.run("n1", ["cat", "/proc/uptime"]).stdout.split()[0]))
    healthy.run("n1", ["sed", "-i", f"s/^end$/leave {up + 180}\\nend/", f"{RUN}/verdict"])  # as the daemon writes it
    job = healthy.submit("#!/bin/sh\nsleep 1\n", [*BATCH, "--nodelist=n1"])
    until(lambda: "drain" in healthy.node_states()["n1"], HAPPENS)
    assert healthy.job_state(job) in ("PENDING", "CONFIGURING", "COMPLETING", "REQUEUED")
    assert "fails: drain disk-space: /var/tmp has 0.0 %" in node_file(healthy, "n1", "log")
    other = healthy.submit("#!/bin/sh\ntrue\n", BATCH)
    until(lambda: healthy.job_state(other) == "COMPLETED", HAPPENS)


def test_a_file_system_that_hangs_is_named_and_holds_up_neither_checks_nor_prolog(healthy: DevCluster) -> None:
    healthy.machines.hang_shared("n1")
    found = look_anew(healthy, "n1")
    assert held_up_s(healthy, "prolog") < ALLOWED_S
    latency = results(found)["mount-latency"]
    (fault,) = latency["faults"]
    assert (latency["status"], fault["device"], fault["on_fail"]) == ("timeout", "/shared", "drain")
    assert fault["evidence"].startswith("/shared on /shared (") and "no answer in 5 s" in fault["evidence"]
    assert results(found)["clock-sync"]["status"] in ("pass", "fail")  # the others went on
    job = healthy.submit("#!/bin/sh\ntrue\n", [*BATCH, "--nodelist=n1"])
    until(lambda: f"job {job}: passes, without leave" in node_file(healthy, "n1", "log"), HAPPENS)
    healthy.machines.release_shared("n1")
    assert results(look_anew(healthy, "n1"))["mount-latency"]["status"] == "pass"


ALLOWED_S = 4.0
"""A prolog takes milliseconds on a quiet machine; each thing that hangs here would hold it up for at least five."""


def held_up_s(cluster: DevCluster, hook: str, job: int = 9_000_000) -> float:
    """Seconds that a job of n1 waits for a hook, which must let it go: the best of three, the machine may be busy."""
    environment = [f"SLURM_JOB_ID={job}", "SLURM_JOB_UID=0", "SLURMD_NODENAME=n1"]
    took = []
    for _ in range(3):
        began = time.monotonic()
        done = cluster.run("n1", ["env", "-i", *environment, str(hooks_of(cluster) / hook)], 90.0, cwd="/")
        took.append(time.monotonic() - began)
        assert done.returncode == 0
    return min(took)


def test_a_check_that_hangs_is_named_and_holds_up_no_job(healthy: DevCluster) -> None:
    """Such as dcgmi, whose host engine does not answer."""
    script = "printf '#!/bin/sh\\nexec sleep 4321\\n' >/usr/bin/dcgmi; chmod 755 /usr/bin/dcgmi; rm -f $0/memory.json"
    healthy.run("n1", ["sh", "-c", script, RUN], cwd="/")
    healthy.run("n1", ["rm", f"{RUN}/verdict", f"{RUN}/verdict.json"], cwd="/")  # so that all checks are due
    try:
        healthy.run("n1", ["env", "-i", "SLURMD_NODENAME=n1", str(hooks_of(healthy) / "health_check")], cwd="/")
        assert held_up_s(healthy, "prolog") < ALLOWED_S
        job = healthy.submit("#!/bin/sh\ntrue\n", [*BATCH, "--nodelist=n1"])
        until(lambda: healthy.job_state(job) == "COMPLETED", HAPPENS)
        until(lambda: verdict(healthy, "n1"), HAPPENS)
        found = results(verdict(healthy, "n1"))
        assert found["gpu-dcgm"]["status"] == "unknown" and "dcgmi health" in found["gpu-dcgm"]["note"]
        assert found["disk-space"]["status"] == "pass"
    finally:
        healthy.run("n1", ["rm", "/usr/bin/dcgmi"], cwd="/")


@contextlib.contextmanager
def slurmctld_stopped(cluster: DevCluster) -> Iterator[None]:
    """It is there, takes connections, and answers nothing."""
    (slurmctld,) = [process.host_pid for process in cluster.machines.pids("ctl") if process.program == "slurmctld"]
    os.kill(slurmctld, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(slurmctld, signal.SIGCONT)


LOOKS_FOR_EVER = """
import os, sys, time
from resilio_hpc.prolog_epilog.base.isolated import Child, gather, still_there

def work(mark):
    mark("/shared")
    open("/tmp/looking", "w").close()
    file = os.open("/shared/looking", os.O_RDWR | os.O_CREAT)
    while True:
        os.pwrite(file, bytes(1 << 20), 0)
        os.fsync(file)

def told(child, ended):
    print(ended.overdue, ended.stuck.where if ended.stuck else "killed", flush=True)
    if ended.stuck:
        sys.stdin.readline()
        while still_there(child.pid, ended.stuck.started):
            time.sleep(0.01)
        print("gone", flush=True)

gather([Child(work, 2.0)], told)
"""


def test_a_child_in_state_d_is_left_and_collected_when_it_comes_back(healthy: DevCluster) -> None:
    """Its request must be with the file system when that stops: most are, while it writes and syncs."""
    for _ in range(8):
        healthy.run("n1", ["rm", "-f", "/tmp/looking"], cwd="/")
        argv = [*healthy.machines.command("n1", [sys.executable, "-c", LOOKS_FOR_EVER], cwd="/")]
        env = {**healthy.machines.environment(), "PYTHONPATH": package_folder()}
        with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin and process.stdout
            until(lambda: healthy.run("n1", ["ls", "/tmp/looking"], check=False, cwd="/").returncode == 0, HAPPENS)
            healthy.machines.hang_shared("n1")
            said = process.stdout.readline().strip()
            healthy.machines.release_shared("n1")
            print("released", file=process.stdin, flush=True)
            gone = process.stdout.readline().strip()
        if said != "True killed":
            break
    assert (said[:12], gone) == ("True state D", "gone")


def test_without_slurmctld_checks_and_verdict_go_on(healthy: DevCluster) -> None:
    healthy.machines.kill_slurmctld()
    try:
        found = look_anew(healthy, "n1")
        assert results(found)["mount-latency"]["status"] == "pass"
    finally:
        healthy.machines.start_slurmctld()
        healthy.wait_for_idle(timeout_s=60.0)


def test_where_no_verdict_can_be_kept_jobs_start_with_a_warning(healthy: DevCluster) -> None:
    full = f"mount -t tmpfs -o size=4k,mode=755 tmpfs {RUN} && head -c 8192 /dev/zero >{RUN}/full; true"
    healthy.run("n1", ["sh", "-c", full], cwd="/")
    healthy.run("n1", ["env", "-i", "SLURMD_NODENAME=n1", str(hooks_of(healthy) / "health_check")])
    done = healthy.run("ctl", ["srun", "--nodelist=n1", "hostname"])
    assert done.stdout.strip() == "n1"


def test_a_task_is_told_which_devices_not_to_use(healthy: DevCluster) -> None:
    boot = verdict(healthy, "n1")["boot"]
    up = healthy.run("n1", ["cat", "/proc/uptime"]).stdout.partition(".")[0]
    lines = ["resilio-verdict 1", f"boot {boot}", f"uptime {up}", "gpus 0", "action evict",
             "evict 1 GPU-bad gpu-ecc: 1 error", "end"]  # fmt: skip
    healthy.run("n1", ["sh", "-c", f"printf '%s\\n' \"$@\" >{RUN}/verdict", "sh", *lines])
    show = ["srun", "--nodelist=n1", "--chdir=/tmp", "printenv", "RESILIO_EVICTED_DEVICES"]
    assert healthy.run("ctl", show).stdout.strip() == "GPU-bad"


def test_the_epilog_ends_and_removes_what_a_job_left_and_nothing_else(healthy: DevCluster) -> None:
    healthy.run("n1", ["sh", "-c", "echo other >/dev/shm/of-root; mkdir -p /dev/shm/linked; ls /etc/passwd"])
    leave = (
        "#!/bin/sh\nmkdir /dev/shm/mine /tmp/mine; echo x >/dev/shm/mine/x; ln -s /etc/passwd /dev/shm/mine/link\n"
        "ln -s /dev/shm/of-root /dev/shm/link; setsid sh -c 'trap \"\" HUP; sleep 3456' </dev/null >/dev/null 2>&1 &\n"
        "sleep 1\n"
    )
    job = healthy.submit(leave, [*BATCH, "--nodelist=n1"], user="user")
    until(lambda: healthy.job_state(job) == "COMPLETED", HAPPENS)
    until(lambda: f"epilog of job {job}" in node_file(healthy, "n1", "log"), HAPPENS)
    assert not any("3456" in " ".join(one.argv) for one in healthy.machines.pids("n1"))
    left = healthy.run("n1", ["sh", "-c", "ls /dev/shm; ls -d /tmp/mine; cat /dev/shm/of-root; wc -l </etc/passwd"],
                       check=False).stdout.split()  # fmt: skip
    assert left[:3] == ["linked", "of-root", "other"] and int(left[3]) > 5
    assert "drain" not in healthy.node_states()["n1"]


def start_daemons(cluster: DevCluster, *options: str) -> None:
    """On both nodes the daemon of the installed unit, which drains."""
    (command,) = re.findall(r"^ExecStart=(.*)$", (hooks_of(cluster) / UNIT).read_text(), re.MULTILINE)
    assert " --drain act" in command
    for node in cluster.nodes:
        variables = f"SLURMD_NODENAME={node} PYTHONPATH={package_folder()} RESILIO_DRAIN_LOG={RUN}/drain.jsonl"
        begin = f"{variables} setsid {' '.join([command, *options])} >{RUN}/daemon.log 2>&1 & echo $! >{RUN}/daemon"
        cluster.run(node, ["sh", "-c", f"rm -f {RUN}/drain.jsonl; {begin}"], cwd="/")


def end_daemons(cluster: DevCluster) -> None:
    for node in cluster.nodes:
        print(node_file(cluster, node, "daemon.log"))
        cluster.run(node, ["sh", "-c", f"kill -9 $(cat {RUN}/daemon)"], check=False, cwd="/")


@pytest.fixture
def watched(healthy: DevCluster) -> Iterator[DevCluster]:
    start_daemons(healthy)
    yield healthy
    end_daemons(healthy)


def reason_of(cluster: DevCluster, node: str) -> str:
    shown = cluster.run("ctl", ["scontrol", "-o", "show", "node", node]).stdout
    return shown.partition(" Reason=")[2]


def test_a_failing_check_drains_its_node_which_comes_back_when_it_passes(watched: DevCluster) -> None:
    watched.run("n1", ["sh", "-c", FILL], cwd="/")
    until(lambda: reason_of(watched, "n1").startswith("resilio:disk-space: /var/tmp has 0.0 %"), HAPPENS)
    watched.run("ctl", ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=new fan"])
    waits = watched.submit("#!/bin/sh\ntrue\n", BATCH)
    watched.run("ctl", ["scontrol", "update", "NodeName=n2", "State=UNDRAIN"])
    until(lambda: watched.job_state(waits) == "COMPLETED", HAPPENS)
    assert "drain" in watched.node_states()["n1"]  # so it was n2 that took the job
    watched.run("ctl", ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=new fan"])
    watched.run("n1", ["umount", "-l", "/var/tmp"], cwd="/")
    until(lambda: "drain" not in watched.node_states()["n1"], HAPPENS)
    again = watched.submit("#!/bin/sh\ntrue\n", BATCH)
    until(lambda: watched.job_state(again) == "COMPLETED", HAPPENS)
    assert reason_of(watched, "n2").startswith("new fan")
    told = node_file(watched, "n1", "drain.jsonl")
    assert '"result":"drained"' in told and '"result":"undrained"' in told


def undrain(cluster: DevCluster, node: str) -> str:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "undrain", node, "--audit", "/tmp/drain.jsonl"]
    done = cluster.run("ctl", argv, 60.0, env={"PYTHONPATH": str(package_folder() or ROOT)})
    return done.stdout


def test_an_undrain_right_after_the_repair_is_no_trap_for_the_next_job(watched: DevCluster) -> None:
    watched.run("n1", ["sh", "-c", FILL], cwd="/")
    until(lambda: reason_of(watched, "n1").startswith("resilio:disk-space"), HAPPENS)
    watched.run("n1", ["umount", "-l", "/var/tmp"], cwd="/")
    assert "; its node daemon looks at disk-space again" in undrain(watched, "n1")
    job = watched.submit("#!/bin/sh\ntrue\n", [*BATCH, "--nodelist=n1"])
    until(lambda: watched.job_state(job) == "COMPLETED", HAPPENS)
    assert "drain" not in watched.node_states()["n1"], reason_of(watched, "n1")


def test_a_drain_of_slurms_for_a_prolog_of_ours_becomes_ours(healthy: DevCluster) -> None:
    prolog = hooks_of(healthy) / "prolog"
    text = prolog.read_text()
    prolog.write_text(text.replace("\nMISSING=pass\n", "\nMISSING=fail\n"))
    try:
        healthy.run("n1", ["rm", "-f", f"{RUN}/verdict", f"{RUN}/verdict.json"], cwd="/")
        job = healthy.submit("#!/bin/sh\ntrue\n", [*BATCH, "--nodelist=n1"])
        until(lambda: reason_of(healthy, "n1").startswith("Prolog error"), HAPPENS)
        assert f" {job} no-verdict there is no verdict yet" in node_file(healthy, "n1", "refused")
        start_daemons(healthy)
        until(lambda: reason_of(healthy, "n1").startswith(f"resilio:no-verdict: prolog of job {job}: there"), HAPPENS)
        assert '"act":"adopt"' in node_file(healthy, "n1", "drain.jsonl")
    finally:
        prolog.write_text(text)
        end_daemons(healthy)


def test_a_stopped_slurmctld_holds_up_neither_hooks_nor_checks_and_the_drain_comes_later(watched: DevCluster) -> None:
    with slurmctld_stopped(watched):
        watched.run("n1", ["sh", "-c", FILL], cwd="/")
        until(lambda: "because drain disk-space" in node_file(watched, "n1", "verdict"), HAPPENS)
        assert held_up_s(watched, "prolog") < ALLOWED_S
        assert "passes, without leave of the storm breaker" in node_file(watched, "n1", "log")
        assert held_up_s(watched, "health_check") < ALLOWED_S
        watched.run("n1", ["env", "-i", "SLURM_JOB_ID=9000000", "SLURM_JOB_UID=0", str(hooks_of(watched) / "epilog")],
                    60.0, cwd="/")  # fmt: skip
    until(lambda: reason_of(watched, "n1").startswith("resilio:disk-space: /var/tmp has 0.0 %"), HAPPENS)


def test_a_storm_of_failing_checks_stops_at_the_breaker_and_jobs_go_on(healthy: DevCluster) -> None:
    policy = hooks_of(healthy) / "one.toml"
    policy.write_text("at_least = 1\n")
    start_daemons(healthy, f"--policy {policy}")
    try:
        for node in healthy.nodes:
            healthy.run(node, ["sh", "-c", FILL], cwd="/")

        def told(node: str) -> str:
            return node_file(healthy, node, "drain.jsonl")

        until(lambda: any('"result":"storm"' in told(node) for node in healthy.nodes), HAPPENS)
        until(lambda: any("withheld " in node_file(healthy, node, "verdict") for node in healthy.nodes), HAPPENS)
        drained = [node for node in healthy.nodes if "drain" in healthy.node_states()[node]]
        assert len(drained) == 1, [told(node) for node in healthy.nodes]
        assert reason_of(healthy, drained[0]).startswith("resilio:")
        job = healthy.submit("#!/bin/sh\ntrue\n", BATCH)
        until(lambda: healthy.job_state(job) == "COMPLETED", HAPPENS)
        assert [node for node in healthy.nodes if "drain" in healthy.node_states()[node]] == drained
    finally:
        end_daemons(healthy)
