"""The ready job scripts, each run on a real Slurm as `resilio submit` renders it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from resilio_hpc.core import process_title
from resilio_hpc.devtools.devcluster import DevCluster
from tests.support.slurm.submitted import EXAMPLES, FAKES, GPT, TEMPLATES, Submitted
from tests.support.waiting import PATIENCE_S, until

ONE = ("gpus_per_node=1", "ranks_per_node=1", "exclusive=false", "time=30")


RENDERED: dict[str, tuple[str, ...]] = {
    "joiner": ("run_dir=runs/1",),
    "burst-buffer": ("local_checkpoints=/nvme",),
    "container-apptainer": ("image=image.sif",),
    "container-pyxis": ("image=image.sqsh",),
    "elastic": ("min_nodes=1",),
    "submitit": ("folder=jobs/%j",),
    "sweep": ("array=0-4", "arguments_file=lines.txt"),
}
"""Template → the values that it asks for. The others ask for none."""


def test_slurm_takes_every_template(cluster: DevCluster) -> None:
    """As it is rendered: each one is run by a test below, some of them in ``make test-all`` only."""
    name_kinds(cluster)
    (cluster.shared / "lines.txt").write_text("-x\n" * 5)
    names = sorted(path.stem for path in TEMPLATES.glob("*.sbatch"))
    for name in names:
        values = ["nodes=2", "gpus_per_node=1", *RENDERED.get(name, ())]
        command = [] if name == "joiner" else ["train.py"]
        argv = [sys.executable, "-m", "resilio_hpc.cli.main", "submit", "--template", name, "--no-check", "--dry-run"]
        script = cluster.run("ctl", [*argv, *values, "--", *command]).stdout
        said = cluster.run("ctl", ["sbatch", "--test-only"], stdin=script)
        assert "to start at" in said.stderr, (name, said)


def test_every_template_is_run_here() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    run = {*re.findall(r'submit\(\s*"([a-z-]+)"', text), *re.findall(r'"([a-z-]+)\.sbatch"', text)}
    assert {path.stem for path in TEMPLATES.glob("*.sbatch")} - run == {"submitit"}  # which test_submitit.py runs


@pytest.mark.slow
def test_one_node_and_how_to_watch_and_stop_it(cluster: DevCluster) -> None:
    job = Submitted(cluster, "one")
    said = job.submit("single-node", [*ONE, 'job_name=it\'s "a" #1 \\ %% job'], GPT)
    name = cluster.run("ctl", ["squeue", "-h", "-j", str(job.job), "-o", "%j"]).stdout.rstrip("\n")
    assert name == 'it\'s "a" #1 \\ %% job'
    assert job.verdict() == "completed", job.output()
    assert said["run_dir"] == f"{job.inside}/resilio-runs/{job.job}"
    assert str(job.run_directories()[0].relative_to(job.directory)) == f"resilio-runs/{job.job}"
    assert (job.directory / Path(str(said["output"])).name).exists()
    assert said["stop"] == f"scancel {job.job}"


def test_several_nodes_and_a_torchrun_script(cluster: DevCluster) -> None:
    job = Submitted(cluster, "several")
    program = [str(EXAMPLES / "train_plain.py"), "--steps", "40", "--checkpoint", f"{job.inside}/plain point.pt"]
    job.submit("multi-node", [*ONE, "nodes=2"], program)
    assert job.verdict() == "completed", job.output()
    assert job.fields("round").data["world_size"] == 2
    assert "[rank 0] 2 ranks, from step 0" in job.output()
    assert (job.directory / "plain point.pt").exists()


@pytest.mark.slow
def test_a_step_of_srun(cluster: DevCluster) -> None:
    job = Submitted(cluster, "srun")
    job.submit("srun", [*ONE, "nodes=2"], GPT)
    assert job.verdict() == "completed", job.output()
    assert job.fields("launch").data["mode"] == "step"
    assert job.fields("round").data["world_size"] == 2
    assert "this srun lacks" not in job.output()


def test_a_spare_takes_the_place_of_a_lost_node(cluster: DevCluster) -> None:
    job = Submitted(cluster, "spare")
    job.submit("spares", [*ONE, "nodes=3", "spares=1"], job.counts(100))
    job.wait_for("committed")
    lost = str(list(job.fields("round").data["members"])[1])
    cluster.machines.crash(lost)
    assert job.verdict() == "completed", job.output()
    members = [event.fields["members"] for event in job.events() if event.kind == "round"]
    assert [len(names) for names in members] == [2, 2]
    assert lost in members[0] and lost not in members[1]


@pytest.mark.slow
def test_a_chain_over_a_time_limit(cluster: DevCluster) -> None:
    job = Submitted(cluster, "chain")
    program = [*GPT, "--step-seconds", "0.2", "--steps", "350", "--every", "20"]
    job.submit("chained", [*ONE, "nodes=2", "spares=1"], program)
    job.wait_for("committed")
    cluster.end_at_time_limit(job.job, after_s=20)
    assert job.verdict() == "completed", job.output()
    jobs = [str(event.fields["job"]) for event in job.events() if event.kind == "launch"]
    assert jobs == [str(job.job), str(job.job + 1)]
    restored = [event.fields["restored"] for event in job.events() if event.kind == "first_step"]
    assert restored[0] == -1 and int(restored[-1]) > 0


def test_a_chain_of_the_script_as_it_is_whose_next_job_is_the_same_again(cluster: DevCluster) -> None:
    job = Submitted(cluster, "chain-sbatch")
    options = ["--gpus-per-node=1", "--nodes=2", "--time=30"]
    program = job.counts(20)
    job.sbatch("chained.sbatch", options, program, SPARES="1", RANKS_PER_NODE="1")
    successor = _successor(job)
    command = cluster.run("ctl", ["squeue", "-h", "-j", successor, "-o", "%o|%D|%b|%l"]).stdout.strip()
    assert command.split(".sh ", 1)[1] == f"{' '.join(program)}|2|gres:gpu:1|30:00"
    assert job.verdict() == "completed", job.output()
    assert job.fields("round").data["members"] == job.fields("launch").data["nodes"][:1]
    assert job.fields("successor_cancelled").data["job"] == successor


def _successor(job: Submitted) -> str:
    described = until(lambda: list(job.directory.glob("resilio-runs/*/chain.json")), "the next job", job.output)
    return str(json.loads(described[0].read_text())["links"][-1]["job"])


@pytest.mark.slow
def test_fewer_nodes_than_asked_for(cluster: DevCluster) -> None:
    job = Submitted(cluster, "fewer")
    program = [*GPT, "--step-seconds", "0.1", "--steps", "60"]
    job.submit("elastic", [*ONE, "nodes=3", "min_nodes=1", "node_unit=2"], program)
    assert job.verdict() == "completed", job.output()
    assert job.fields("round").data["world_size"] == 2  # of 3: the unit is 2


def wait_for_sizes(job: Submitted, sizes: list[int]) -> None:
    """Until the rounds of the run have had these world sizes."""
    until(
        lambda: [event.fields["world_size"] for event in job.events() if event.kind == "round"] == sizes,
        f"rounds of {sizes} ranks", job.output,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_grows_with_joiners(cluster: DevCluster) -> None:
    job = Submitted(cluster, "grows")
    job.submit("elastic", [*ONE, "nodes=1", "max_nodes=2"], [*GPT, "--step-seconds", "0.1", "--steps", "100000"])
    job.wait_for("committed")
    first = job.job
    (node,) = job.fields("launch").data["nodes"]
    job.submit("joiner", ["gpus_per_node=1", f"exclude={node}", f"run_dir=resilio-runs/{first}"], [])
    wait_for_sizes(job, [1, 2])
    cluster.run("ctl", ["scancel", str(first)])
    # where the machine is too busy for KillWait (2 s here) nobody tells the joiner: see the next test
    assert job.verdict() in ("terminated", "cancelled"), job.output()


@pytest.mark.slow
def test_a_run_that_goes_on_on_a_joiners_node_alone_ends_when_its_own_job_is_cancelled(
    cluster: DevCluster,
) -> None:
    job = Submitted(cluster, "alone")
    script = job.directory / "outlives.sbatch"  # the job lasts, though its launcher and agent are killed
    text = (TEMPLATES / "elastic.sbatch").read_text()
    script.write_text(text.replace("exec resilio-launch", "resilio-launch") + "\nsleep 600\n")
    script.write_text(script.read_text().replace('"$@"\n', '"$@" || true\n'))
    command = [*GPT, "--step-seconds", "0.1", "--steps", "100000"]
    options = ["--gpus-per-node=1", "--nodes=1", "--time=30"]
    job.sbatch(f"{job.inside}/{script.name}", options, command, MAX_NODES="2", RANKS_PER_NODE="1")
    job.wait_for("committed")
    first = job.job
    (node,) = job.fields("launch").data["nodes"]
    job.submit("joiner", ["gpus_per_node=1", f"exclude={node}", f"run_dir=resilio-runs/{first}"], [])
    wait_for_sizes(job, [1, 2])
    for process in cluster.machines.pids(node):
        if process_title.is_agent(process.argv) or any(word.endswith("/resilio-launch") for word in process.argv):
            os.kill(process.host_pid, signal.SIGKILL)
    wait_for_sizes(job, [1, 2, 1])
    cluster.run("ctl", ["scancel", str(first)])
    assert job.verdict() == "cancelled", job.output()
    assert f"took part: cancelled: job {first} was cancelled" in job.output()


@pytest.mark.slow
def test_warnings_before_the_time_limit_reach_the_agents_and_nobody_dies_of_them(
    cluster: DevCluster,
) -> None:
    """What ``sbatch --signal=USR2@t`` (all steps) and ``--signal=B:USR1@t`` (the batch script) send."""
    job = Submitted(cluster, "warned")
    job.submit("elastic", [*ONE, "nodes=2"], [*GPT, "--step-seconds", "0.1", "--steps", "50"])
    job.wait_for("committed")
    cluster.run("ctl", ["scancel", "--signal=USR2", str(job.job)])
    cluster.run("ctl", ["scancel", "--batch", "--signal=USR1", str(job.job)])
    assert job.verdict() == "completed", job.output()
    events = job.events()
    assert {e.fields.get("to") for e in events if e.kind == "signal"} == {None, "agents"}
    assert [e.fields["signal"] for e in events if e.kind == "warned"][:1] == ["USR2"]
    assert [e.kind for e in events if e.kind in ("rank_failed", "spawner_died", "saver_died", "agent_ended")] == []


@pytest.mark.slow
def test_ranks_in_a_container_by_a_fake_of_apptainer(cluster: DevCluster) -> None:
    job = Submitted(cluster, "apptainer")
    (job.directory / "an image.sif").touch()
    (job.directory / "data").mkdir()
    values = [*ONE, "nodes=2", "image=an image.sif", f"mounts={job.inside}/data"]
    job.submit("container-apptainer", values, [sys.executable, *GPT], str(FAKES))
    assert job.verdict() == "completed", job.output()
    assert job.fields("round").data["world_size"] == 2
    assert f"[rank 1] fake apptainer: an image.sif, {job.inside}" in job.output()


@pytest.mark.slow
def test_agents_in_a_container_by_a_fake_of_pyxis(cluster: DevCluster) -> None:
    job = Submitted(cluster, "pyxis")
    (job.directory / "image.sqsh").touch()
    job.submit("container-pyxis", [*ONE, "nodes=2", "image=image.sqsh"], GPT, str(FAKES))
    assert job.verdict() == "completed", job.output()
    assert job.fields("launch").data["mode"] == "step"
    assert "this srun lacks" not in job.output()


def test_a_sweep_gives_each_task_its_line(cluster: DevCluster) -> None:
    job = Submitted(cluster, "sweep")
    (job.directory / "show.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (job.directory / "lines.txt").write_text("--lr 0.1 --name 'a b'\n\n--lr \"$(touch hit)\" * ~ \\'\n'open\n")
    values = ["ranks_per_node=1", "gpus_per_node=0", "array=0-4", "arguments_file=lines.txt", "output=%a.out"]
    job.submit("sweep", values, ["--no-torch", "show.py", "-x"])
    job.wait()
    said = [(job.directory / f"{task}.out").read_text() for task in range(5)]
    shown = [
        json.loads(line) for text in said for line in text.splitlines() if line.startswith("[") and '"' in line[:3]
    ]
    assert shown == [["-x", "--lr", "0.1", "--name", "a b"], ["-x"], ["-x", "--lr", "$(touch hit)", "*", "~", "'"]]
    assert "line 3 of lines.txt: a quote is not closed" in said[3]
    assert "lines.txt has 4 lines, so none for task 4" in said[4]
    assert len(job.run_directories()) == 3 and not (job.directory / "hit").exists()


def name_kinds(cluster: DevCluster) -> None:
    """Nodes of two kinds, as the template for mixed partitions asks for."""
    for nodes, kind in {"n1,n2": "a100", "n3,n4,n5": "h100"}.items():
        features = [f"AvailableFeatures={kind}", f"ActiveFeatures={kind}"]
        cluster.run("ctl", ["scontrol", "update", f"NodeName={nodes}", *features])


@pytest.mark.slow
def test_nodes_of_one_kind_in_a_mixed_partition(cluster: DevCluster) -> None:
    name_kinds(cluster)
    job = Submitted(cluster, "mixed")
    job.submit(
        "mixed-nodes",
        ["nodes=3", "gpus_per_node=2", "ranks_per_node=2", "time=30", "constraint=[a100|h100]"],
        [*GPT, "--batch", "12"],
    )
    assert job.verdict() == "completed", job.output()
    assert job.fields("launch").data["nodes"] == ["n3", "n4", "n5"]  # only of h100 there are three
    assert job.fields("round").data["world_size"] == 6  # two each


@pytest.mark.slow
def test_checkpoints_by_way_of_a_nodes_own_disk(cluster: DevCluster) -> None:
    job = Submitted(cluster, "buffer")
    job.submit("burst-buffer", [*ONE, "nodes=2", "local_checkpoints=/nvme"], GPT)
    assert job.verdict() == "completed", job.output()
    assert [event for event in job.events() if event.kind == "local"] != []


@pytest.mark.slow
def test_an_mpi_program(cluster: DevCluster) -> None:
    job = Submitted(cluster, "mpi")
    program = [str(EXAMPLES / "mpi_jacobi.py"), "--size=64", "--steps=40", f"--result={job.inside}/result"]
    job.submit("mpi", ["nodes=3", "ranks_per_node=2", "spares=1", "time=30", "exclusive=false"], program)
    assert job.verdict() == "completed", job.output()
    assert job.fields("round").data["world_size"] == 4
    assert (job.directory / "result").exists()


@pytest.mark.slow
def test_a_job_from_python(cluster: DevCluster) -> None:
    example = [sys.executable, str(EXAMPLES / "submit_with_submitit.py")]
    options = ["--nodes=2", "--ranks-per-node=1", "--folder=/shared/template-submitit"]
    done = cluster.run("ctl", [*example, *options, *GPT], PATIENCE_S)
    assert "ranks [0, 1]; " in done.stdout
    (run,) = (cluster.shared / "template-submitit").glob("*/*_run")
    assert json.loads((run / "verdict.json").read_text())["verdict"] == "completed"
