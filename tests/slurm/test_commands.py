"""What Slurm's commands print, as recorded from three of its series."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.devtools.devcluster.spec import SLURM_SERIES
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.chain import successor_options as options
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.allocation import detect
from resilio_hpc.slurm.client.commands import parse_fields

SAMPLES = Path(__file__).with_name("samples")
SERIES = tuple(SLURM_SERIES)


def no_file(path: str) -> bool:
    return False


def jobs(series: str) -> list[dict[str, str]]:
    text = (SAMPLES / f"scontrol_show_jobs_{series}.txt").read_text()
    return [parse_fields(line) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("series", SERIES)
def test_the_fields_that_we_use_are_read(series: str) -> None:
    for fields in jobs(series):
        assert fields["JobId"].isdigit()
        assert fields["JobState"].split()[0].isupper()
        assert fields["TimeLimit"] == "UNLIMITED" or ":" in fields["TimeLimit"]
        assert fields["WorkDir"].startswith("/")
        assert fields["Partition"]
        assert " " not in fields["NumNodes"]


def test_values_may_hold_equal_signs_and_spaces() -> None:
    fields = parse_fields("JobId=7 JobName=my run TRES=cpu=3,node=3 Comment=a b  c JOB_GRES=(null)   Nodes=n[2-4] X=\n")
    assert fields == {
        "JobId": "7", "JobName": "my run", "TRES": "cpu=3,node=3", "Comment": "a b  c", "JOB_GRES": "(null)",
        "Nodes": "n[2-4]", "X": "",
    }  # fmt: skip


def test_nothing_is_read_from_nothing() -> None:
    assert parse_fields("") == parse_fields("\n") == {}
    assert parse_fields("slurm_load_jobs error: Invalid job id specified") == {}


@pytest.mark.parametrize("series", SERIES)
def test_a_successor_repeats_what_the_job_was_given(series: str) -> None:
    fields = jobs(series)[0]
    job = fields["JobId"]
    arguments = options.successor_arguments(fields, job, 5, Path("/run/batch.sh"))
    assert arguments[0] == f"--dependency=afterany:{job}"
    assert {"--nodes=5", "--no-kill", "--export=ALL", f"--partition={fields['Partition']}"} <= set(arguments)
    assert f"--time={fields['TimeLimit']}" in arguments
    assert arguments[-2:] == ["--open-mode=append", "/run/batch.sh"]
    assert not any("(null)" in argument or "N/A" in argument for argument in arguments)


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("/data/run-42/slurm-42.out", "/data/run-42/slurm-%j.out"),
        ("/data/42/out.txt", "/data/42/out.txt"),  # no such folder would be there for the next job
        ("/a/case-42-05.42.txt", "/a/case-42-05.%j.txt"),
        ("slurm-42.out", "slurm-%j.out"),
        ("/a/step142.out", "/a/step142.out"),
    ],
)
def test_the_number_of_a_job_is_told_from_others_in_its_outputs_path(path: str, pattern: str) -> None:
    assert options.output_pattern(path, "42") == pattern


def test_a_successors_output_is_named_for_itself_and_nothing_else_changes() -> None:
    fields = {"StdOut": "/scratch42/j.42.out", "StdErr": "/scratch42/j.42.err", "TresPerNode": "gres:gpu:4"}
    arguments = options.successor_arguments(fields, "42", 1, Path("b.sh"))
    assert "--gres=gpu:4" in arguments
    assert "--output=/scratch42/j.%j.out" in arguments  # a number on its own; 420 and 142 are left alone
    other = options.successor_arguments({"StdOut": "/d420/142.out", "StdErr": "/d420/142.out"}, "42", 1, Path("b.sh"))
    assert "--output=/d420/142.out" in other
    assert not any(argument.startswith("--error") for argument in other)


def test_a_successors_environment_is_the_users_own() -> None:
    before = {
        "PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/s.conf", "SBATCH_TIMELIMIT": "1", "SRUN_DEBUG": "3",
        "RESILIO_LINK": "2",
    }  # fmt: skip
    after = chain.successor_environment(before, Path("/run"), 2, "7", ("script", "train.py"))
    assert json.loads(after.pop(chain.RUNS)) == [{"program": ["script", "train.py"], "run_dir": "/run", "job": "7"}]
    assert after == {
        "PATH": "/bin", "SLURM_CONF": "/etc/s.conf", "RESILIO_RUN_DIR": "/run", "RESILIO_LINK": "3",
        "RESILIO_PREDECESSOR": "7",
    }  # fmt: skip


def test_the_chain_file_is_read_back_and_damage_is_no_chain(tmp_path: Path) -> None:
    links = [chain.Link(1, "29"), chain.Link(2, "31_4")]
    chain.write_links(tmp_path, links)
    assert chain.read_links(tmp_path) == links
    for damage in ("", "[]", '{"links": [{"number": 1}]}', '{"links": 3}', "\x00"):
        (tmp_path / "chain.json").write_text(damage)
        assert chain.read_links(tmp_path) == []
    assert [chain.link_number({"RESILIO_LINK": text}) for text in ("3", "", "x", "0", "-2")] == [3, 1, 1, 1, 1]


def test_where_we_run() -> None:
    batch = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    }  # fmt: skip
    allocation = detect(batch)
    assert allocation is not None
    assert (allocation.nodes, allocation.in_step, allocation.cpus_per_node) == (("n1", "n2"), False, (8, 8))
    step = detect(
        batch | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_LOCALID": "0"}
    )
    assert step is not None
    assert (step.nodes, step.in_step, step.task) == (("n2",), True, 1)
    assert detect({}) is None
    with pytest.raises(UsageError, match="SLURM_JOB_ID=7"):
        detect({"SLURM_JOB_ID": "7"})


def test_a_successor_gets_the_scripts_own_arguments() -> None:
    line = (
        "JobId=7 Command=/jobs/train.sbatch train.py lr=0.1 --name my run TimeLimit=1 WorkDir=/w TimeLimit=02:00:00\n"
    )
    fields = parse_fields(line)
    assert (fields["WorkDir"], fields["TimeLimit"]) == ("/w", "02:00:00")
    arguments = options.successor_arguments(fields, "7", 1, Path("b.sh"), words=["train.py", "lr=0.1", "my run"])
    assert arguments[-6:] == ["b.sh", "train.py", "lr=0.1", "--name", "my run", "TimeLimit=1"]
    newest = parse_fields("JobId=7 Command=/jobs/a.sh one SubmitLine=sbatch -n 3 /jobs/a.sh one WorkDir=/w\n")
    assert options.script_arguments(newest, (), no_file) == ["one"]
    assert options.script_arguments({"Command": "(null)"}, (), no_file) == []
    assert options.script_arguments({}, (), no_file) == []


@pytest.mark.parametrize(
    ("value", "script", "expected"),
    [
        ("gres:gpu:2", "#SBATCH --gpus-per-node=8", ["--gpus-per-node=2"]),
        ("gres/gpu:h100:8,gres/nvme:1", "#SBATCH -N 2 --gpus-per-node 8", ["--gpus-per-node=h100:8", "--gres=nvme:1"]),
        ("gres:gpu:h100:8,gres:nvme:1", "#SBATCH --gres=gpu:8", ["--gres=gpu:h100:8,nvme:1"]),
        ("gres:gpu", "#SBATCH --gpus-per-node=1", ["--gpus-per-node=1"]),
        ("gres:gpu:2", "echo --gpus-per-node=8", ["--gres=gpu:2"]),
        ("(null)", "#SBATCH --gpus-per-node=0", []),
    ],
)
def test_a_successor_asks_for_gpus_as_its_script_does(value: str, script: str, expected: list[str]) -> None:
    assert options.generic_resources(value, f"#!/bin/bash\n{script}\n") == expected


# Command and SubmitLine of one job, as three of Slurm's series showed them
SPACED = {
    "22.05": {"Command": "/home/me/my dir/a job.sh x y z"},
    "24.11, with accounting": {
        "Command": "/home/me/my dir/a job.sh",
        "SubmitLine": "sbatch --mem=200 -N1 --signal=USR2@90 /home/me/my dir/a job.sh x y z",
    },
    "26.05": {
        "Command": "/home/me/my dir/a job.sh",
        "SubmitLine": "sbatch --parsable --signal USR2@90 --job-name=a ./a job.sh x y z",
    },
}


@pytest.mark.parametrize("series", SPACED)
def test_a_script_whose_path_holds_spaces_keeps_its_arguments(series: str) -> None:
    fields = SPACED[series]
    arguments = options.script_arguments(fields, ["x y"], lambda path: path == "/home/me/my dir/a job.sh")
    assert arguments == ["x y", "z"]
    assert options.warning_signal(fields, "") == (["--signal=USR2@90"] if "SubmitLine" in fields else [])


def test_arguments_that_nobody_tells_are_noticed() -> None:
    bare = {"Command": "/jobs/a.sh"}
    assert options.arguments_unknown(bare, 'exec train.py "$@"')
    assert not options.arguments_unknown(bare, "exec train.py")
    assert not options.arguments_unknown(bare | {"SubmitLine": "sbatch /jobs/a.sh"}, 'exec "$@"')
    assert not options.arguments_unknown({"Command": "/jobs/a.sh one"}, 'exec "$1"')


SHAPES = [
    ({"MinMemoryNode": "100M", "CPUs/Task": "2"}, "", ["--mem=100M", "--cpus-per-task=2"]),
    ({"MinMemoryCPU": "50M"}, "", ["--mem-per-cpu=50M"]),
    ({"NtasksPerN:B:S:C": "2:0:*:*", "NumTasks": "8"}, "", ["--ntasks-per-node=2"]),
    ({"MinMemoryNode": "0", "NumTasks": "4", "CPUs/Task": "1"}, "", []),
    ({"NumTasks": "8"}, "", ["--ntasks=8"]),
    ({"MinMemoryNode": "1G"}, "#SBATCH --mem-per-gpu=2G", []),  # sbatch: "mutually exclusive"
    ({"MinMemoryNode": "1G"}, "#SBATCH --mem=2G", ["--mem=1G"]),
    ({"OverSubscribe": "NO"}, "", ["--exclusive"]),  # 22.05, 24.11
    ({"OverSubscribe": "NO", "Exclusive": "NO"}, "", []),  # 26.05 says NO to everybody
    ({"OverSubscribe": "NO", "Exclusive": "NODE"}, "", ["--exclusive"]),
    ({"OverSubscribe": "OK", "Requeue": "0"}, "", ["--no-requeue"]),
]


@pytest.mark.parametrize(("fields", "text", "expected"), SHAPES)
def test_a_successor_has_the_shape_of_its_job(fields: dict[str, str], text: str, expected: list[str]) -> None:
    assert options.shape(fields, 4, text) == expected


def test_our_own_note_in_the_comment_is_not_repeated() -> None:
    arguments = options.successor_arguments({"Comment": "resilio: handed over: x"}, "7", 1, Path("b.sh"))
    assert not any(argument.startswith("--comment") for argument in arguments)


def test_a_requeued_job_finds_the_successor_that_it_submitted_before() -> None:
    links = [chain.Link(1, "7"), chain.Link(2, "8")]
    assert chain.waiting_successor(links, 1, "7") == "8"
    assert chain.waiting_successor(links, 1, "9") is None  # another job's chain
    assert chain.waiting_successor(links, 2, "8") is None
    assert chain.waiting_successor([], 1, "7") is None


AGING = {"PriorityType": "priority/multifactor", "PriorityWeightAge": "1000"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AGING, True),
        (AGING | {"PriorityFlags": "SMALL_RELATIVE_TO_TIME,ACCRUE_ALWAYS"}, False),
        (AGING | {"PriorityWeightAge": "0"}, False),
        (AGING | {"PriorityType": "priority/basic"}, False),
        ({}, False),
    ],
)
def test_whether_a_waiting_job_ages(config: dict[str, str], expected: bool) -> None:
    assert chain.waits_without_aging(config) is expected


def test_where_a_job_is_held() -> None:
    assert commands.parse_holding("n1|n[2-3]|RUNNING\n") == commands.Holding("n1", ("n2", "n3"), "RUNNING")
    assert commands.parse_holding("") == commands.Holding("", (), commands.UNKNOWN)
    for torn in ("n1|n2", "n1|n[2-|RUNNING", "n1|n2|", "slurm_load_jobs error: x"):
        assert commands.parse_holding(torn) is None  # no answer, which is not "no job"


def test_how_each_run_of_a_job_ended() -> None:
    text = "REQUEUED\nPREEMPTED\nCANCELLED by 20001\n"
    assert commands.parse_accounted(text) == [
        commands.PartEnd("REQUEUED"), commands.PartEnd("PREEMPTED"), commands.PartEnd("CANCELLED", "20001")
    ]  # fmt: skip
    assert commands.parse_accounted("\n") == []


ARRAY = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"}


def test_the_task_that_bears_its_arrays_number_is_named_so_that_no_other_task_is_meant() -> None:
    assert commands.address("7", ARRAY) == "7_4"
    assert commands.address("8", ARRAY) == "8"  # another job
    assert commands.address("8", ARRAY | {"SLURM_JOB_ID": "8"}) == "8"  # a task with a number of its own
    assert commands.address("7", {"SLURM_JOB_ID": "7"}) == "7"


NOON = 1795608000.0


@pytest.mark.parametrize(
    ("asked", "answered", "ahead"),
    [(0.2, 0.9, 0.0), (-3.0, 4.0, 0.0), (200.0, 201.0, 200.0), (-300.0, -299.0, -299.0), (-1.0, 18.0, 0.0)],
)
def test_how_far_our_clock_is_ahead_of_slurmctlds(asked: float, answered: float, ahead: float) -> None:
    text = "Configuration data as of 1795608000\nAccountingStorageHost = x\n"
    assert commands.parse_clock_ahead(text, NOON + asked, NOON + answered) == ahead
    for unread in ("", text.replace("1795608000", "2026-11-25T12:00:00")):
        assert commands.parse_clock_ahead(unread, NOON + asked, NOON + answered) == 0.0


def test_a_heterogeneous_job_is_refused() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1", "SLURM_HET_SIZE": "2"}
    with pytest.raises(UsageError, match=r"heterogeneous \(2 components\)"):
        detect(environment)
    assert detect(environment | {"SLURM_HET_SIZE": "1"}) is not None
