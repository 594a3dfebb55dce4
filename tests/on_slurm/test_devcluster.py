"""The dev cluster is a real Slurm, its failures are real failures, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio_hpc.cli.devcluster import main
from resilio_hpc.core.errors import CommandError, SlurmError, UsageError
from resilio_hpc.devtools import devcluster
from resilio_hpc.devtools.devcluster import DevCluster, names
from resilio_hpc.devtools.devcluster.spec import NEWEST_SERIES, base_directory, layout
from tests.support.clusters import MIDDLE_SERIES, each_series, unique_name
from tests.support.requirements import need_slurm
from tests.support.waiting import PATIENCE_S, until


def traces(name: str) -> list[str]:
    """Whatever on the host still belongs to a cluster: processes, mounts, files."""
    state = str(layout(name).state)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if state.encode() in told:
                found.append(f"process {entry.name}: {told[:200]!r}")
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if state in line]
    return found + ([state] if Path(state).exists() else [])


def host_interfaces() -> set[str]:
    return {entry.name for entry in Path("/sys/class/net").iterdir()}


# ---- what a cluster is


def test_srun_runs_once_on_every_node_under_its_own_host_name(cluster: DevCluster) -> None:
    done = cluster.run("ctl", ["srun", "--nodes=5", "sh", "-c", "hostname; readlink /proc/self/ns/net"])
    assert set(done.stdout.split()[0::2]) | set(done.stdout.split()[1::2]) >= set(cluster.nodes)
    assert len({word for word in done.stdout.split() if word.startswith("net:")}) == 5
    assert re.fullmatch(r"\d+\.\d+\.\d+", cluster.slurm_version)


def test_jobs_see_their_fake_gpus(cluster: DevCluster) -> None:
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; ls -l /dev/fakegpu1"]
    done = cluster.run("ctl", ["srun", "--nodes=1", "--gpus-per-node=2", *show])
    assert done.stdout.splitlines()[0] == "0,1"
    assert done.stdout.splitlines()[1].startswith("c")


def test_shared_is_one_directory_and_tmp_and_nvme_are_private(cluster: DevCluster) -> None:
    cluster.run("n1", ["sh", "-c", "echo 1 | tee /shared/from-n1 /tmp/from-n1 /dev/shm/from-n1 /nvme/from-n1"])
    seen = cluster.run("n2", ["sh", "-c", "ls /shared /tmp /dev/shm /nvme | grep -c from-n1"]).stdout
    assert seen.strip() == "1"
    assert (cluster.shared / "from-n1").read_text() == "1\n"
    assert not Path("/tmp/from-n1").exists()


def test_ranks_run_this_interpreter_with_its_packages(cluster: DevCluster) -> None:
    program = "import resilio_hpc, msgspec, sys; print(sys.prefix)"
    done = cluster.run("ctl", ["srun", "--nodes=2", sys.executable, "-c", program])
    assert done.stdout.split() == [sys.prefix] * 2


def test_an_ordinary_user_can_run_jobs_but_is_no_administrator(cluster: DevCluster) -> None:
    assert "uid=20001(user)" in cluster.run("ctl", ["srun", "id"], user="user").stdout
    drain = ["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test"]
    with pytest.raises(CommandError, match=r"[Ii]nvalid user"):
        cluster.run("ctl", drain, user="user")


def test_a_command_that_hangs_is_ended_and_reported(cluster: DevCluster) -> None:
    with pytest.raises(CommandError, match="no answer within"):
        cluster.run("n1", ["sleep", "4321"], timeout_s=0.2)
    until(
        lambda: not any("4321" in p.argv for p in cluster.machines.pids("n1")), "the end of the command", cluster.status
    )


# ---- failures


def test_a_power_cut_kills_that_node_only_and_its_nvme_survives(cluster: DevCluster) -> None:
    cluster = cluster
    keep = "echo kept > /nvme/kept; echo lost > /tmp/lost; echo lost > /dev/shm/lost"
    cluster.run("n3", ["sh", "-c", keep])
    step = "srun --no-kill --kill-on-bad-exit=0 --wait=0 sh -c 'touch /shared/up.$SLURMD_NODENAME; exec sleep 300'"
    job = cluster.submit(f"#!/bin/sh\n{step}\n", ["--no-kill", "--nodelist=n1,n2,n3", "--nodes=3"])
    until(
        lambda: all((cluster.shared / f"up.{n}").exists() for n in ("n1", "n2", "n3")),
        "a step on every node",
        cluster.status,
    )
    before = cluster.machines.pids("n3")
    cluster.machines.crash("n3")
    assert not any(Path(f"/proc/{process.host_pid}").exists() for process in before)
    cluster.wait_for_node("n3", ("down", "down*"), 30.0)
    assert cluster.job_state(job) == "RUNNING"
    for node in ("n1", "n2"):
        assert any(process.argv[-2:] == ("sleep", "300") for process in cluster.machines.pids(node))
    with pytest.raises(SlurmError, match="power it on"):
        cluster.run("n3", ["true"])
    cluster.machines.boot("n3")
    left = cluster.run("n3", ["sh", "-c", "cat /nvme/kept; ls /tmp /dev/shm | grep -c lost"], check=False).stdout
    assert left.split() == ["kept", "0"]


def test_a_node_that_was_powered_off_and_on_is_reached_at_once(cluster: DevCluster) -> None:
    everywhere = ["srun", "-N4", "-w", "n[1-4]", "hostname"]
    cluster.run("ctl", everywhere, timeout_s=PATIENCE_S)
    answers = [cluster.run("n1", ["getent", "hosts", node]).stdout.split()[0] for node in ("n3", "n4")]
    known = "import socket, sys; [socket.create_connection((host, 6818), 5).close() for host in sys.argv[1:]]"
    cluster.run("n1", [sys.executable, "-c", known, *answers])  # so that n1 knows the addresses of their cards
    for node in ("n3", "n4"):
        cluster.machines.crash(node)
        cluster.machines.boot(node)
    cluster.wait_for_idle()
    done = cluster.run("n1", everywhere, check=False, timeout_s=PATIENCE_S)
    assert sorted(done.stdout.split()) == ["n1", "n2", "n3", "n4"], done.stderr


def test_a_partitioned_node_runs_on_unreached_and_comes_back(cluster: DevCluster) -> None:
    cluster = cluster
    address = cluster.machines.states()["n2"].address
    reach = ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{address}/6818"]
    cluster.run("n1", reach)
    cluster.machines.partition("n2")
    with pytest.raises(CommandError):
        cluster.run("n1", reach)
    assert cluster.run("n2", ["hostname"]).stdout == "n2\n"
    cluster.machines.heal("n2")
    until(lambda: cluster.run("n1", reach, check=False).returncode == 0, "n2 in reach again", cluster.status)


def test_halves_of_a_cluster_reach_their_own_nodes_only(cluster: DevCluster) -> None:
    cluster = cluster

    def reaches(source: str, target: str) -> bool:
        program = f"exec 3<>/dev/tcp/{cluster.machines.states()[target].address}/6818"
        return cluster.run(source, ["timeout", "1", "bash", "-c", program], check=False).returncode == 0

    cluster.machines.split("n3", "n4")
    assert reaches("n3", "n4")
    assert reaches("n1", "n2")
    assert not reaches("n1", "n3")
    assert not reaches("n4", "n2")
    for node in ("n3", "n4"):
        cluster.machines.heal(node)
    until(lambda: reaches("n1", "n3") and reaches("n4", "n2"), "all nodes in reach again", cluster.status)


def test_a_step_outlives_slurmctld(cluster: DevCluster) -> None:
    cluster = cluster
    script = "#!/bin/sh\nsrun sh -c 'touch /shared/started; while [ ! -e /shared/go ]; do sleep 0.1; done'\n"
    job = cluster.submit(script, ["--nodes=2"])
    until((cluster.shared / "started").exists, "the job's start", cluster.status)
    cluster.wait_until_saved(job)
    cluster.machines.kill_slurmctld()
    with pytest.raises(CommandError):
        cluster.run("ctl", ["timeout", "1", "sinfo"])
    cluster.machines.start_slurmctld()
    (cluster.shared / "go").touch()
    assert cluster.wait_for_job(job, ("COMPLETED", "FAILED", "CANCELLED"), 20.0) == "COMPLETED"


def test_slurmd_dies_alone_and_returns(cluster: DevCluster) -> None:
    cluster = cluster
    cluster.machines.kill_slurmd("n4")
    assert "munged" in {process.program for process in cluster.machines.pids("n4")}
    assert "slurmd" not in {process.program for process in cluster.machines.pids("n4")}
    cluster.machines.start_slurmd("n4")
    assert "slurmd" in {process.program for process in cluster.machines.pids("n4")}
    with pytest.raises(SlurmError, match="already running"):
        cluster.machines.start_slurmd("n4")


# ---- several, twice, and nothing left


def test_two_clusters_run_side_by_side_and_leave_nothing(cluster: DevCluster) -> None:
    interfaces = host_interfaces()
    name = unique_name("beside")
    with devcluster.start(name, nodes=1, conf=["KillWait=7"]) as other:
        assert other.run("ctl", ["srun", "hostname"]).stdout == "n1\n"
        assert other.node_states().keys() == {"n1"}
        assert "KillWait                = 7 sec" in other.run("ctl", ["scontrol", "show", "config"]).stdout
        with pytest.raises(UsageError, match="already up"):
            devcluster.start(name, nodes=1)
        assert set(names()) >= {name, cluster.name}
        assert host_interfaces() == interfaces
    assert traces(name) == []
    assert cluster.run("ctl", ["srun", "hostname"]).stdout == "n1\n"


@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3])
def test_a_killed_start_leaves_no_process_and_down_sweeps_its_files(delay_s: float) -> None:
    need_slurm()
    name = unique_name("killed")
    program = f"from resilio_hpc.devtools import devcluster; devcluster.start({name!r}, nodes=3, conf=['X=1'])"
    # an unknown setting makes slurmctld refuse, so this start can never succeed before it is killed
    starter = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    until((layout(name).state / "spec.json").exists, "the cluster's files", names)
    time.sleep(delay_s)
    starter.kill()
    starter.wait()
    files_only = [str(layout(name).state)]
    until(lambda: traces(name) == files_only, "no process of it", lambda: traces(name))
    assert main(["down", "--name", name]) == 0
    assert traces(name) == []


def test_a_cluster_that_cannot_start_says_why_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    need_slurm()
    name = unique_name("broken")
    assert main(["up", "--name", name, "--nodes", "1", "--conf", "SelectType=select/nonsense"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "slurmctld did not start" in message
    assert main(["down", "--name", name]) == 0
    assert traces(name) == []


# ---- commands


def test_the_commands_do_what_the_methods_do(cluster: DevCluster, capsys: pytest.CaptureFixture[str]) -> None:
    name = ["--name", cluster.name]
    assert main(["run", *name, "n2", "--", "sh", "-c", "hostname; exit 7"]) == 7
    assert capsys.readouterr().out == "n2\n"
    assert main(["partition", *name, "n5"]) == 0
    assert main(["status", *name, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["slurm_version"] == cluster.slurm_version
    assert {m["name"]: m["link_up"] for m in status["machines"]}["n5"] is False
    assert main(["heal", *name, "n5"]) == 0
    assert main(["run", "ctl", *name, "--", "echo", "--name", "x"]) == 0
    assert capsys.readouterr().out == "--name x\n"
    assert main(["crash", *name, "n9"]) == 1
    assert "no machine 'n9'" in capsys.readouterr().err
    assert main(["up", *name]) == 2
    assert main(["status", "--name", "no-such-cluster"]) == 1
    assert main(["up", "--nodes", "none"]) == 2


def test_a_users_batch_script_finds_the_launcher_and_the_gpus(cluster: DevCluster) -> None:
    (cluster.shared / "ranks.py").write_text("import os\nprint('rank', os.environ['RANK'], 'runs', flush=True)\n")
    launch = "exec resilio-launch --no-torch --nproc-per-node gpu --run-dir /shared/run /shared/ranks.py"
    script = f"#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=2 --exclusive --no-kill\n{launch}\n"
    job = cluster.submit(script, ["--output=/shared/said.txt"])
    cluster.wait_for_job(job, ["COMPLETED", "FAILED"], PATIENCE_S)
    said = (cluster.shared / "said.txt").read_text()
    assert [rank for rank in range(4) if f"rank {rank} runs" in said] == [0, 1, 2, 3], said
    assert "completed: every rank exited with 0" in said


# ---- other kinds


def test_a_rootless_cluster_runs_jobs_with_fake_gpus_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    need_slurm()
    name = unique_name("rootless")
    with devcluster.start_rootless(name, nodes=2, gpus=2) as rootless:
        show = ["srun", "--nodes=2", "--gpus-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"]
        assert sorted(rootless.run("ctl", show).stdout.split("\n")) == ["", "n1 0,1", "n2 0,1"]
        job = rootless.submit("#!/bin/sh\nexec sleep 300\n")
        rootless.wait_for_job(job, ["RUNNING"], 10.0)
        assert main(["crash", "--name", name, "n1"]) == 2
        assert "--rootless" in capsys.readouterr().err
    assert traces(name) == []


@each_series(NEWEST_SERIES, slow=MIDDLE_SERIES)
def test_newer_slurm_runs_this_interpreter(cluster: DevCluster) -> None:
    assert cluster.slurm_version.startswith(cluster.spec.series)
    program = "import os, h5py, zmq, torch; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    command = ["srun", "--nodes=2", "--gpus-per-node=1", sys.executable, "-c", program]
    assert cluster.run("ctl", command, timeout_s=60.0).stdout.split() == ["0", "0"]
    cluster.machines.crash("n2")
    cluster.machines.boot("n2")
    cluster.wait_for_idle(timeout_s=90.0)


def test_state_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESILIO_DEVCLUSTER_DIR", str(tmp_path))
    assert base_directory() == tmp_path
    assert names() == []


def test_a_terminated_up_leaves_nothing_running() -> None:
    need_slurm()
    name = unique_name("term")
    command = "import sys; from resilio_hpc.cli.devcluster import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["up", "--name", name, "--nodes", "2", "--conf", "SlurmctldPort=6999-6999"]
    starter = subprocess.Popen([sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True)
    until((layout(name).state / "control").exists, "the cluster's control socket", names)
    starter.send_signal(signal.SIGTERM)
    starter.communicate(timeout=20.0)
    until(lambda: traces(name) in ([], [str(layout(name).state)]), "no process of it", lambda: traces(name))
    main(["down", "--name", name])
    assert traces(name) == []
